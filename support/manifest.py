"""raw/manifest.json: what a corpus is made of, which documents each split has, and whether the files still are what they were.

`build_manifest` takes stock of the files that stage 1 brought, `make_mix` joins corpora, and `load_corpus` opens either for
every later stage.
"""

import dataclasses
import heapq
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config import Config, DataConfig
from corpus import KINDS, SPLITS, Corpus, Documents, MixedCorpus, SourceFile, disk_bytes, document_hash
from support.common import Progress, UserError, fingerprint, misfit, read_json, sha256_file, write_json

LARGE_SHARE = 0.1  # of the text: where a file that is one document has more, documents are cut, else it may be a split
FEW_DOCUMENTS = 20  # below this, documents are cut into pieces, else a split would be a document or none
FEW_BYTES = 4_096  # a split with less text than this gets more documents: about two windows of 512 tokens
LEAST_SHARE = 1e-12  # of a source of a mix, beside the one with the largest weight
POLICIES = {"bom": "one leading dropped per file", "newlines": "CRLF becomes LF", "empty documents": "dropped"}


def manifest_path(config: Config) -> Path:
    return config.raw_dir / "manifest.json"


def load_corpus(config: Config) -> Corpus:
    """The corpus of this configuration. Raises UserError, naming the command, where it is missing or has changed."""
    command = download_command(config)
    manifest = read_json(manifest_path(config), command)
    try:
        check_manifest(manifest)
        if "mix" in manifest:
            return _load_mix(config, manifest)
        corpus = Corpus(manifest, config.raw_dir)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{manifest_path(config)} is damaged ({error}); make the corpus again with: {command}") from None
    again = config.command("download_data.py")  # knows the source from the manifest
    for path, entry in zip(corpus.paths, manifest["files"], strict=True):
        _require_unchanged(path, entry, again)
    return corpus


_COUNTS = {"format": (1,), "documents": dict.fromkeys(SPLITS, int), "fingerprint": str}
_ENTRY = {"path": str, "kind": tuple(KINDS.values()), "split": (*SPLITS, "hash"), "source": str}
_ENTRY |= {"bytes": int, "mtime_ns": int, "sha256": str, "documents": int}
_MANIFEST = {**_COUNTS, "files": [_ENTRY], "settings": dict, "splitting": dict, "source": dict, "notes": [str]}
_MIX = {**_COUNTS, "mix": [{"name": str, "weight": float, "fingerprint": str}]}


def check_manifest(manifest: dict[str, Any]) -> None:
    """Raises ValueError unless it is the whole manifest of a corpus, or of a mix, and nobody changed it."""
    if (problem := misfit(manifest, _MIX if "mix" in manifest else _MANIFEST)) is not None:
        raise ValueError(problem)
    found = fingerprint(manifest["mix"]) if "mix" in manifest else _identity(manifest)
    if manifest["fingerprint"] != found:
        raise ValueError("its fingerprint is not that of its files and settings")


def _identity(manifest: dict[str, Any]) -> str:
    """Fingerprint of all that decides the documents and their splits."""
    files = [{key: entry[key] for key in ("sha256", "kind", "split", "source")} for entry in manifest["files"]]
    return fingerprint([files, manifest["settings"], manifest["splitting"], POLICIES])


def download_command(config: Config) -> str:
    """What makes this corpus, as far as its name tells."""
    size = {"wikitext103": ("--size", "full"), "wikitext2": ("--size", "small"), "local": ("--size", "local")}
    own = ("--input", "PATH") if config.run.corpus not in (*size, "sydsgpt") else ()
    return config.command("download_data.py", *size.get(config.run.corpus, own))


def _require_unchanged(path: Path, entry: dict[str, Any], command: str) -> None:
    try:
        stat = path.stat()
    except (OSError, ValueError):  # the latter for a path that cannot be one
        raise UserError(f"{path} is missing; run: {command}") from None
    if (stat.st_size, stat.st_mtime_ns) == (entry["bytes"], entry["mtime_ns"]):
        return
    if stat.st_size != entry["bytes"] or sha256_file(path) != entry["sha256"]:
        raise UserError(f"{path} has changed since the corpus was made; take stock again with: {command}")


def build_manifest(config: Config, source: dict[str, Any], files: Sequence[SourceFile]) -> dict[str, Any]:
    """Takes stock of a corpus: hashes its files, counts documents, decides the splits; writes and returns raw/manifest.json.

    `source` says where the files came from; `files` are in reading order. The manifest's `notes` are sentences for the user.
    Raises UserError for text that cannot be read and for a corpus without any.
    """
    files = _with_usable_splits(files)
    entries = [_stock(config.raw_dir, file) for file in files]
    manifest = {
        "format": 1,
        "corpus": config.run.corpus,
        "source": source,
        "settings": dataclasses.asdict(config.data),
        "policies": POLICIES,
        "splitting": _usual_splitting(config),
        "files": entries,
    }
    corpus = Corpus(manifest, config.raw_dir)
    survey = _decide_splitting(corpus)
    if sum(survey.documents.values()) == 0:
        read = ", ".join(str(path) for path in corpus.paths[:3]) + (", ..." if len(corpus.paths) > 3 else "")
        raise UserError(f"no text in {read or 'an empty corpus'}: 0 usable characters; give files that hold some")
    for entry, documents in zip(entries, survey.per_file, strict=True):
        entry["documents"] = documents
    manifest["documents"] = dict(survey.documents)
    manifest["counts"] = dict(survey.counts)
    manifest["notes"] = [*(f"{what}: {n:,}" for what, n in survey.counts.items()), *_split_notes(manifest)]
    manifest["fingerprint"] = _identity(manifest)
    write_json(manifest_path(config), manifest)
    return manifest


def make_mix(config: Config, text: str) -> None:
    """Makes the corpus of this configuration a mix of others: `wiki:0.7,books:0.3`, in shares of the training tokens.

    Raises UserError for a text that says no mix, and where that would replace a corpus that is none.
    """
    weights = _parse_mix(text)
    path, name = manifest_path(config), config.run.corpus
    if name in weights:
        raise UserError(f"--mix {text}: a mix cannot hold itself; name the mix with --corpus NAME")
    if path.exists() and "mix" not in read_json(path, download_command(config)):
        raise UserError(f"{path} describes a corpus that is no mix; name the mix with another --corpus NAME")
    try:
        members = {member: load_corpus(config.with_settings({"corpus": member})) for member in weights}
    except ValueError as error:  # a name that can be no corpus's
        raise UserError(f"--mix {text}: {error}") from None
    for member, corpus in members.items():
        if corpus.weights or corpus.splitting["unit"] == "chunk":
            raise UserError(f"--mix {text}: {member} is itself a mix or split by chunks; mix plain corpora")
    total = sum(weights.values())
    mix = [{"name": m, "weight": weights[m] / total, "fingerprint": corpus.fingerprint} for m, corpus in members.items()]
    documents = {split: sum(corpus.documents[split] for corpus in members.values()) for split in SPLITS}
    manifest = {"format": 1, "corpus": name, "mix": mix, "documents": documents, "files": [], "fingerprint": fingerprint(mix)}
    write_json(path, manifest)


def _parse_mix(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = entry.strip().rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or name in weights or not 0 < weight < float("inf"):
            raise UserError(f"--mix {text}: {entry!r} is no NAME:WEIGHT with a weight above 0, each name once")
        weights[name] = weight
    if min(weights.values()) < max(weights.values()) * LEAST_SHARE:
        raise UserError(f"--mix {text}: no text can be repeated often enough for weights that are so far apart")
    return weights


def _load_mix(config: Config, manifest: dict[str, Any]) -> MixedCorpus:
    members = {}
    for entry in manifest["mix"]:
        member = load_corpus(config.with_settings({"corpus": entry["name"]}))
        if member.fingerprint != entry["fingerprint"]:
            mix = ",".join(f"{e['name']}:{e['weight']:g}" for e in manifest["mix"])
            command = config.command("prepare_data.py", "--mix", mix)
            raise UserError(f"{entry['name']} has changed since it was mixed into {config.run.corpus}; run: {command}")
        members[entry["name"]] = member
    return MixedCorpus(manifest, members)


def _with_usable_splits(files: Sequence[SourceFile]) -> list[SourceFile]:
    """Files that bring training and validation text keep their splits; otherwise all are split by document."""
    brought = {file.split for file in files}
    if "hash" in brought or {"train", "val"} <= brought:
        return list(files)
    return [dataclasses.replace(file, split="hash") for file in files]


def _stock(raw_dir: Path, file: SourceFile) -> dict[str, Any]:
    path = raw_dir / file.path
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path") from None
    return {
        **dataclasses.asdict(file),
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "sha256": sha256_file(path),
    }


class _Survey:
    """One pass over a corpus: how many documents and bytes each split gets, and the lowest document hashes."""

    KEPT = 4_096

    def __init__(self, corpus: Corpus) -> None:
        self.documents: Counter = Counter(dict.fromkeys(SPLITS, 0))
        self.bytes: Counter = Counter(dict.fromkeys(SPLITS, 0))
        self.counts: Counter = Counter()
        self.per_file = [0] * len(corpus.files)
        self.hashed, self.hashed_bytes = 0, 0  # documents, and their bytes, that are split by hash
        self.largest_file = 0  # bytes of the largest of them that is a whole file, and so no document that the user made
        self._lowest: list[tuple[int, int]] = []  # (-hash, bytes): a heap whose top is the highest hash kept
        by_hash = [file.split == "hash" for file in corpus.files]
        whole_file = [file.kind == "text" and not corpus.separator for file in corpus.files]
        with Progress(corpus.bytes, "reading documents", "bytes", scale=True) as progress:
            for block in corpus.blocks():
                found = corpus.read(block)
                self._add(found, by_hash, whole_file)
                progress.update(disk_bytes(block))

    def _add(self, found: Documents, by_hash: list[bool], whole_file: list[bool]) -> None:
        self.counts.update(found.counts)
        for split in SPLITS:
            self.documents[split] += len(found.texts[split])
            for text, file in zip(found.texts[split], found.files[split], strict=True):
                size = len(text.encode("utf-8"))
                self.bytes[split] += size
                self.per_file[file] += 1
                if by_hash[file]:
                    self.hashed += 1
                    self.hashed_bytes += size
                    if whole_file[file]:
                        self.largest_file = max(self.largest_file, size)
                    if split != "train" or len(self._lowest) < self.KEPT:
                        self._keep(document_hash(text), size)

    def _keep(self, value: int, size: int) -> None:
        push = heapq.heappush if len(self._lowest) < self.KEPT else heapq.heappushpop
        push(self._lowest, (-value, size))

    @property
    def lowest(self) -> list[tuple[int, int]]:
        """(hash, bytes) of the documents with the lowest hashes, in order."""
        return sorted((-value, size) for value, size in self._lowest)


def _usual_splitting(config: Config) -> dict[str, Any]:
    """Hashes are uniform, so the lowest val_fraction of their range is the validation split."""
    val_below, test_below = _fraction_limits(config.data)
    splitting: dict[str, Any] = {"unit": config.data.split_unit, "val_below": val_below, "test_below": test_below}
    if config.data.split_unit == "chunk":
        splitting["chunk_tokens"] = config.model.block_size
    return splitting


def _fraction_limits(data: DataConfig) -> tuple[int, int]:
    val_below = round(data.val_fraction * 2**64)
    return val_below, val_below + round(data.test_fraction * 2**64)


def _decide_splitting(corpus: Corpus) -> _Survey:
    """Fills in corpus.splitting. Returns the survey under the final rule."""
    by_document = corpus.splitting["unit"] == "document"
    whole_files = not corpus.separator and all(f.kind == "text" and f.split == "hash" for f in corpus.files)
    if by_document and whole_files and len(corpus.files) < FEW_DOCUMENTS:
        _cut_documents(corpus, corpus.bytes)  # decided before reading: such a file may be larger than memory
    survey = _Survey(corpus)
    few = 0 < survey.hashed < FEW_DOCUMENTS or survey.largest_file > max(FEW_BYTES, LARGE_SHARE * survey.hashed_bytes)
    if corpus.splitting["unit"] == "document" and few:
        _cut_documents(corpus, survey.hashed_bytes)
        survey = _Survey(corpus)
    if by_document and survey.hashed and _too_small(corpus.settings, survey):
        _fill_small_splits(corpus, survey)
        survey = _Survey(corpus)
    return survey


def _cut_documents(corpus: Corpus, total_bytes: int) -> None:
    """Pieces are large enough for a training window each, and some hundreds in number where there is text for that."""
    least = min(2 * FEW_BYTES, max(256, total_bytes // 12))
    corpus.splitting.update(unit="piece", piece_bytes=min(max(least, total_bytes // 500), 256 << 10))


def _floor(survey: _Survey) -> int:
    return min(FEW_BYTES, survey.hashed_bytes // 12)


def _too_small(data: DataConfig, survey: _Survey) -> bool:
    wanted = {"val": data.val_fraction, "test": data.test_fraction}
    return any(share > 0 and survey.bytes[split] < _floor(survey) for split, share in wanted.items())


def _fill_small_splits(corpus: Corpus, survey: _Survey) -> None:
    """Moves the two thresholds so that each wanted split has its share and some text, and training keeps the most."""
    lowest, data = survey.lowest, corpus.settings
    val_end = _fill(lowest, 0, data.val_fraction, survey)
    test_end = _fill(lowest, val_end, data.test_fraction, survey)
    limits = [value for value, _ in lowest] + [2**64]
    corpus.splitting.update(val_below=limits[val_end], test_below=limits[test_end])


def _fill(lowest: list[tuple[int, int]], start: int, share: float, survey: _Survey) -> int:
    """Where a split of `share` that begins with document `start` ends, in order of hash; at most a third of all."""
    end, size, most = start, 0, start + survey.hashed // 3
    while share > 0 and end < min(most, len(lowest)) and (size < _floor(survey) or end - start < share * survey.hashed):
        size += lowest[end][1]
        end += 1
    return end


def split_notes(corpus: Corpus) -> list[str]:
    """Where documents and splits are not simply what the files hold, in sentences to print; of a mix for each member."""
    if isinstance(corpus, MixedCorpus):
        return [f"{member.manifest['corpus']}: {note}" for member in corpus.members for note in split_notes(member)]
    return _split_notes(corpus.manifest)


def _split_notes(manifest: dict[str, Any]) -> list[str]:
    splitting, settings, notes = manifest["splitting"], manifest["settings"], []
    if splitting["unit"] == "piece":
        size = splitting["piece_bytes"]
        notes.append(
            "too few documents for a split, or one too large: cut at blank lines, then line ends, into pieces of about "
            f"{size:,} bytes"
        )
    if splitting["unit"] == "chunk":
        notes.append(
            f"splits are chunks of {splitting['chunk_tokens']:,} tokens: documents straddle them, so held-out loss is flattered"
        )
    if settings["keep_fraction"] < 1:
        notes.append(f"kept {settings['keep_fraction']:g} of the documents, drawn by hash with seed {settings['shuffle_seed']}")
    wanted = {"val": settings["val_fraction"], "test": settings["test_fraction"]}
    empty = [split for split, share in wanted.items() if share > 0 and not manifest["documents"][split]]
    hashed = any(entry["split"] == "hash" for entry in manifest["files"])
    if empty and hashed and splitting["unit"] != "chunk":
        notes.append(f"too little text to split: nothing is left for {' and '.join(empty)}; give 100 KB or more")
    elif (splitting["val_below"], splitting["test_below"]) != _fraction_limits(DataConfig(**settings)):
        notes.append(
            "little text: validation and test take a larger share than asked until the corpus grows, so that each has some"
        )
    return notes
