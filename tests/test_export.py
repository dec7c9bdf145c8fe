"""Exported folders as transformers, tokenizers and safetensors really read them, and others' weights as we read them."""

import dataclasses
import json
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import assert_user_error
from tiny_models import random_model, save_run, tiny_config, tiny_tokenizer

from config import ComputeConfig, SampleConfig
from model import GPT
from support.common import UserError
from support.hf_gpt2 import is_hf_folder, load_hf_folder, read_safetensors, write_safetensors
from support.inference import initial_model_config, load_initial_weights
from support.sampling import generate

transformers = pytest.importorskip("transformers")
FP32 = ComputeConfig(device="cpu", dtype="float32", threads=1)
HOSTILE = [
    "",
    " ",
    "\n\n\t x  y \u00a0z\u2003\u2028\u3000",
    "<PAD><UNK><BOS> <EOS> <|endoftext|> <PAD",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea e\u0301 \u00e9 \u200b\ufeff\ufffd",
    "\u4e2d\u6587\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0e44\u0e17\u0e22 \uac00\u1100\u1161",
    "don't I'LL we've 'tis ''''ll 3.14159 ten000 x_y __init__ a" + "b" * 300,
    "\x00\x01\x1c\x1d\x1e\x1f\x7f\x85 end ",
    " lead and trail ",
    "".join(map(chr, [*range(0x20, 0x250), 0x1D7D9, 0x2167, 0xB2, 0x0663])),
]
VARIANTS = {
    "word": {"bias": False, "tied_head": True, "activation": "gelu"},
    "byte": {"bias": True, "tied_head": True, "activation": "gelu_tanh"},
    "gpt2": {"bias": True, "tied_head": False, "activation": "gelu_tanh"},
}


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, tmp_path_factory):
    """(kind, tokenizer, model, folder): a random model of each recipe, exported by the command."""
    import export

    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny_tokenizer(request.param)
    config = tiny_config(tokenizer, **VARIANTS[request.param])
    assert config.model.padded_vocab_size > tokenizer.vocab_size
    model = random_model(config)
    path = save_run(folder / "run", tokenizer, config, model)
    assert export.main(["--checkpoint", str(path), "--out", str(folder / "hf")]) == 0
    return request.param, tokenizer, model, folder / "hf"


def test_logits_equal(exported):
    """Would catch a matrix not transposed, a bias that is not zero, padding rows kept, or the wrong GELU."""
    _, tokenizer, model, folder = exported
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    idx = torch.randint(0, tokenizer.vocab_size, (3, 32))
    with torch.no_grad():
        theirs, ours = peer(idx).logits, model(idx)[0]
    assert theirs.shape == ours.shape
    assert (theirs - ours).abs().max() < 1e-4
    assert peer.config.vocab_size == tokenizer.vocab_size


def test_every_stored_weight_is_used_and_none_is_missing(exported):
    """Would catch the tied matrix stored twice, or a name that the library ignores and fills with random numbers."""
    kind, _, _, folder = exported
    _, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert ("lm_head.weight" in read_safetensors(folder / "model.safetensors")) == (not VARIANTS[kind]["tied_head"])


def test_ids_equal_on_hostile_text(exported):
    """Would catch special tokens parsed out of text, added around it, or whitespace that the two sides see differently."""
    _, tokenizer, _, folder = exported
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in HOSTILE:
        assert peer(text)["input_ids"] == tokenizer.encode(text), repr(text)
        assert peer.decode(tokenizer.encode(text), skip_special_tokens=True) == tokenizer.decode(tokenizer.encode(text)), text


def test_ids_equal_on_wikitext(exported, wikitext_zip):
    """Would catch any difference that the chosen strings miss, on both WikiText files."""
    _, tokenizer, _, folder = exported
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    with zipfile.ZipFile(wikitext_zip) as archive:
        texts = [archive.read(name).decode("utf-8") for name in archive.namelist() if name.endswith(".raw")]
    assert len(texts) == 2
    for text in texts:
        pieces = text.split("\n \n")  # in pieces, since the library's memory grows with the length of one text
        for piece, theirs in zip(pieces, peer(pieces)["input_ids"], strict=True):
            assert theirs == tokenizer.encode(piece)


def test_same_greedy_text_and_pipeline_works(exported):
    """Would catch generation settings that stop, forbid or pad differently from ours."""
    _, tokenizer, model, folder = exported
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.encode_prompt("the quick")
    never = [] if tokenizer.pad_id is None else [tokenizer.pad_id]
    greedy = SampleConfig(temperature=0.0)
    ours = list(generate(model, prompt, 20, greedy, stop_ids=[tokenizer.eos_id], never=never))
    theirs = peer.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert [i for i in theirs if i != tokenizer.eos_id] == ours
    pipeline = transformers.pipeline("text-generation", model=str(folder))
    assert pipeline("the quick", max_new_tokens=4)[0]["generated_text"].startswith("the quick")


def test_safetensors_library_reads_ours_and_we_read_its(exported, tmp_path):
    """Would catch a header or an alignment that only our own reader accepts."""
    library = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(3, 5), "b": torch.tensor(7), "c": torch.randn(2, 0), "d": torch.randn(4).bfloat16()}
    with open(tmp_path / "ours", "wb") as file:
        write_safetensors(file, tensors, {"format": "pt"})
    library.save_file(tensors, tmp_path / "theirs")
    for found in (library.load_file(tmp_path / "ours"), read_safetensors(tmp_path / "theirs")):
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_export_and_reading_back_give_the_same_model(exported):
    """Would catch an import that forgets a transpose, the padding rows or the exported tokenizer."""
    _, tokenizer, model, folder = exported
    loaded = load_hf_folder(folder, FP32)
    idx = torch.randint(0, tokenizer.vocab_size, (2, 32))
    with torch.no_grad():
        assert torch.allclose(loaded.model(idx)[0], model(idx)[0], atol=1e-5)
    assert loaded.tokenizer.sha256 == tokenizer.sha256


@pytest.mark.parametrize("stored", ["safetensors", "sharded", "old names", "pytorch_model.bin"])
def test_a_gpt2_folder_of_the_library(tmp_path, stored):
    """Would catch the layouts GPT-2 is found in: shards, OpenAI's names without prefix, pickles, vocab.json and merges.txt."""
    tokenizer = tiny_tokenizer("gpt2")
    settings = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 16, "vocab_size": tokenizer.vocab_size}
    torch.manual_seed(2)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).eval()
    peer.save_pretrained(tmp_path, max_shard_size="100KB" if stored == "sharded" else "1GB")
    data = json.loads(tokenizer.to_json())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(data["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in data["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if stored in ("old names", "pytorch_model.bin"):
        (tmp_path / "model.safetensors").unlink()
    if stored == "old names":
        old = {name.removeprefix("transformer."): t for name, t in peer.state_dict().items() if not name.startswith("lm_head")}
        old["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
        with open(tmp_path / "model.safetensors", "wb") as file:
            write_safetensors(file, old, {"format": "pt"})
    if stored == "pytorch_model.bin":
        torch.save(peer.state_dict(), tmp_path / "pytorch_model.bin")
    assert is_hf_folder(tmp_path)
    loaded = load_hf_folder(tmp_path, FP32)
    idx = torch.randint(0, tokenizer.vocab_size, (2, 16))
    with torch.no_grad():
        assert torch.allclose(loaded.model(idx)[0], peer(idx).logits, atol=1e-5)
    assert loaded.tokenizer.encode("the fox") == tokenizer.encode("the fox")


QWEN3 = {"position": "rotary", "norm": "rmsnorm", "qk_norm": True, "activation": "swiglu"}
NANOCHAT = {"position": "rotary", "norm": "rmsnorm_plain", "qk_norm": True, "activation": "relu2", "embedding_norm": True}


@pytest.mark.parametrize("settings", [QWEN3, NANOCHAT, NANOCHAT | {"logit_softcap": 5.0}, QWEN3 | {"tied_head": False}])
def test_rotary_models_equal_their_standard_architecture(tmp_path, settings):
    """Would catch heads rotated the wrong way, gate and value swapped, or a norm or soft cap that the library leaves out."""
    import export

    tokenizer = tiny_tokenizer("byte")
    config = tiny_config(tokenizer, **settings)
    model = random_model(config)
    path = save_run(tmp_path / "run", tokenizer, config, model)
    assert export.main(["--checkpoint", str(path), "--out", str(tmp_path / "hf")]) == 0
    peer, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    idx = torch.randint(0, tokenizer.vocab_size, (2, 32))
    with torch.no_grad():
        assert (peer(idx).logits - model(idx)[0]).abs().max() < 1e-4
    prompt = tokenizer.encode_prompt("the quick")
    greedy = list(generate(model, prompt, 12, SampleConfig(temperature=0.0), stop_ids=[3], never=[0]))
    theirs = peer.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    assert [i for i in theirs if i != tokenizer.eos_id] == greedy


def test_no_gpt2_is_refused_with_the_reason(tmp_path, stage):
    """Would catch a folder that loads in the library and computes something else."""
    tokenizer = tiny_tokenizer("byte")
    config = tiny_config(tokenizer, logit_softcap=15.0, activation="relu2")
    path = save_run(tmp_path / "run", tokenizer, config, random_model(config))
    result = stage("export.py", "--checkpoint", path, "--out", tmp_path / "hf")
    assert_user_error(result, "no gpt2: logit_softcap=15.0, activation=relu2", "no qwen3", "--format safetensors")
    assert not (tmp_path / "hf").exists()


def test_bare_weights_hold_the_model(tmp_path):
    """Would catch weights that are exported under names or shapes that do not go back."""
    import export

    library = pytest.importorskip("safetensors.torch")
    tokenizer = tiny_tokenizer("byte")
    config = tiny_config(tokenizer)
    model = random_model(config)
    path = save_run(tmp_path / "run", tokenizer, config, model)
    arguments = ["--checkpoint", str(path), "--out", str(tmp_path / "bare"), "--format", "safetensors"]
    assert export.main(arguments) == 0
    with pytest.raises(UserError, match=r"not empty.*--overwrite"):
        export.main(arguments)
    assert export.main([*arguments, "--overwrite"]) == 0
    state = library.load_file(tmp_path / "bare" / "model.safetensors")
    fresh = GPT(config.model)
    assert fresh.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))


def test_overwriting_never_mixes_two_models(tmp_path, monkeypatch):
    """Old settings or another tokenizer beside new weights after a kill or a change of format; and a run's own config.json, or
    a corpus's tokenizer, replaced under --overwrite.
    """
    import export

    tokenizer = tiny_tokenizer("byte")
    config = tiny_config(tokenizer)
    path = save_run(tmp_path / "run", tokenizer, config, random_model(config))
    (tmp_path / "run" / "config.json").write_text("{}", encoding="utf-8")
    common = ["--checkpoint", str(path), "--overwrite", "--out"]
    with pytest.raises(UserError, match=r"holds config\.json, which no export wrote"):
        export.main([*common, str(tmp_path / "run")])
    folder = tmp_path / "out"
    assert export.main([*common, str(folder)]) == 0

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export, "write_text", killed)  # the first step behind the weights
        export.main([*common, str(folder)])
    assert [p.name for p in folder.iterdir()] == ["model.safetensors"]
    assert export.main([*common, str(folder)]) == 0
    assert export.main([*common, str(folder), "--format", "safetensors"]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "tokenizer.json"]


def damage(folder: Path, what: str) -> str:
    """Spoils one thing in a folder; returns what the error must name."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if what == "cut":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        return "model.safetensors"
    if what == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        return "tokenizer"
    if what == "no json":
        (folder / "config.json").write_text("{", encoding="utf-8")
        return "config.json"
    changes = {
        "type": {"model_type": "llama"},
        "epsilon": {"layer_norm_epsilon": 1e-6},
        "shape": {"n_layer": 5},
        "heads": {"n_head": 5},
    }
    (folder / "config.json").write_text(json.dumps(config | changes[what]), encoding="utf-8")
    return {"type": "llama", "epsilon": "layer_norm_epsilon", "shape": "do not fit", "heads": "n_embd"}[what]


@pytest.mark.parametrize("what", ["cut", "no tokenizer", "no json", "type", "epsilon", "shape", "heads"])
def test_damaged_or_foreign_folders_are_plain_errors(tmp_path, what):
    """Would catch a KeyError or a shape traceback, or a near-GPT-2 that is read as one."""
    from support.hf_gpt2 import to_hf_config, to_hf_state

    tokenizer = tiny_tokenizer("byte")
    config = tiny_config(tokenizer)
    with open(tmp_path / "model.safetensors", "wb") as file:
        write_safetensors(file, to_hf_state(random_model(config).state_dict(), config.model), {"format": "pt"})
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(config.model, 2, 3)), encoding="utf-8")
    load_hf_folder(tmp_path, FP32)
    needle = damage(tmp_path, what)
    with pytest.raises(UserError, match=needle):
        load_hf_folder(tmp_path, FP32)


def test_initial_weights_from_checkpoint_and_folder(exported):
    """Would catch training that starts from random weights, from another vocabulary's, or cannot shorten the context."""
    kind, tokenizer, model, folder = exported
    for source in (folder, folder.parent / "run"):
        config = tiny_config(tokenizer, **VARIANTS[kind], dropout=0.25)
        shape = initial_model_config(source, config)
        assert shape.dropout == 0.25 and shape.n_layer == 2
        fresh = GPT(shape).eval()
        assert str(source) in load_initial_weights(fresh, source, config, tokenizer)
        idx = torch.randint(0, tokenizer.vocab_size, (2, 32))
        with torch.no_grad():
            assert torch.allclose(fresh(idx)[0], model(idx)[0], atol=1e-5)
        short = GPT(dataclasses.replace(shape, block_size=8)).eval()
        load_initial_weights(short, source, config, tokenizer)
        with torch.no_grad():
            assert torch.allclose(short(idx[:, :8])[0], model(idx[:, :8])[0], atol=1e-5)
        with pytest.raises(UserError, match="another vocabulary"):
            load_initial_weights(fresh, source, config, tiny_tokenizer("byte", "other text " * 5))
