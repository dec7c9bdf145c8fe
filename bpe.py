"""The core of byte-pair encoding: counting pieces, learning merges, applying them."""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence


def learn_merges(
    pieces: dict[bytes, int],
    symbols: Callable[[bytes], list[int]],
    tokens: list[bytes],
    forbidden: Sequence[bytes],
    vocab_size: int,
    min_frequency: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[int, int]]:
    """Merges the most frequent pair until `tokens` (extended in place) holds `vocab_size`; ties go to the smallest pair."""
    words = [symbols(piece) for piece in pieces]
    weights = list(pieces.values())
    counts: Counter[tuple[int, int]] = Counter()
    where: dict[tuple[int, int], set[int]] = defaultdict(set)
    for w, word in enumerate(words):
        for pair in zip(word, word[1:], strict=False):
            counts[pair] += weights[w]
            where[pair].add(w)
    heap = [(-n, tokens[a], tokens[b], a, b) for (a, b), n in counts.items()]
    heapq.heapify(heap)
    merges: list[tuple[int, int]] = []
    wanted = vocab_size - len(tokens)
    while heap and len(merges) < wanted:
        n, _, _, a, b = heapq.heappop(heap)
        now = counts[a, b]
        if now != -n:
            if now > 0:
                heapq.heappush(heap, (-now, tokens[a], tokens[b], a, b))
            continue
        if now < min_frequency:
            break
        spelled = tokens[a] + tokens[b]
        if spelled in forbidden:
            continue
        new = len(tokens)
        tokens.append(spelled)
        merges.append((a, b))
        changed = set()
        for w in where.pop((a, b)):
            old, word = words[w], merge_pair(words[w], a, b, new)
            words[w] = word
            for pair in zip(old, old[1:], strict=False):
                counts[pair] -= weights[w]
            for pair in zip(word, word[1:], strict=False):
                counts[pair] += weights[w]
                where[pair].add(w)
                changed.add(pair)
        for x, y in changed:
            heapq.heappush(heap, (-counts[x, y], tokens[x], tokens[y], x, y))
        if progress:
            progress(len(merges), wanted)
    return merges


def merge_pair(ids: list[int], a: int, b: int, new: int) -> list[int]:
    """`ids` with every a, b (from the left) replaced by `new`."""
    merged, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and ids[i] == a and ids[i + 1] == b:
            merged.append(new)
            i += 2
        else:
            merged.append(ids[i])
            i += 1
    return merged


def merge_word(ids: list[int], pairs: dict[tuple[int, int], tuple[int, int]]) -> list[int]:
    """Applies the lowest-ranking merge, again and again."""
    while len(ids) > 1:
        found = min((p for p in zip(ids, ids[1:], strict=False) if p in pairs), key=lambda p: pairs[p][0], default=None)
        if found is None:
            break
        ids = merge_pair(ids, *found, pairs[found][1])
    return ids
