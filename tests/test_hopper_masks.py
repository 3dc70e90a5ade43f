"""The Hopper kernels with lengths, windows, offsets, segments, soft caps and sinks, in the Mosaic GPU interpreter."""

import dataclasses
import functools

import numpy as np
import pytest
from attention_cases import AttentionCase, by_kernels, check_forward, cotangents, in_tiers, oracle, relative_error
from test_hopper_backward import check as check_gradients_of_kernels
from test_hopper_forward import interpreted
from test_masks import pairs_seen

from helpers.attention.hopper import backward, forward
from helpers.attention.hopper import backward_schedule as schedule
from helpers.attention.hopper.visible_tiles import VisibleTiles, is_block_sparse, visible_tiles
from helpers.attention.problem import check_call

SMALL = forward.Tiles(block_k=64, programs=2)
CAUSAL = {"is_causal": True}
SINKS = {"sinks": np.array([1.5, -3], np.float32)}


def documents(*ends, length):
    """Segment ids of documents that end there, for queries and keys."""
    ids = np.searchsorted(np.array(ends), np.arange(length), side="right").astype(np.int32)[None]
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


class Padded(AttentionCase):
    """A case whose padding holds no numbers."""

    def inputs(self):
        (query, key, value), arguments = super().inputs()
        for b in range(self.B):
            query[b, self.query_lengths[b] :] = np.nan
            key[b, self.key_lengths[b] :], value[b, self.key_lengths[b] :] = np.inf, np.nan
        return (query, key, value), arguments


DOCUMENTS = AttentionCase(200, 200, H=64, K=2, dtype="bfloat16", arguments=CAUSAL | documents(60, 130, length=200))
LENGTHS = Padded(150, 300, H=64, B=3, dtype="bfloat16", query_lengths=(150, 40, 0), key_lengths=(230, 70, 0))
# Of the middle tiles none are seen by the others, and the last queries see no key.
NUMBERS = np.repeat(np.array([2, 5, 2, 9], np.int32), [128, 128, 128, 16])[None]
OUT_OF_ORDER = {"query_segment_ids": NUMBERS, "key_value_segment_ids": np.where(NUMBERS == 9, 2, NUMBERS)}
WINDOW = {"local_window_size": 70, "causal_offset": 100, **CAUSAL}


FORWARD = {
    "a window, an offset and sinks": (AttentionCase(170, 250, H=64, dtype="float16", arguments=WINDOW | SINKS), SMALL),
    "documents, where guesses fail": (dataclasses.replace(DOCUMENTS, T=330, S=330, logits="rising", arguments=CAUSAL | documents(60, 190, length=330)), SMALL._replace(programs=1)),
    "dynamic documents, of several turns": (dataclasses.replace(DOCUMENTS, T=320, S=320, arguments=CAUSAL | documents(60, 190, length=320)), SMALL._replace(dynamic=True)),
    "dynamic lengths": (dataclasses.replace(LENGTHS, H=128), SMALL._replace(dynamic=True, guess=False)),
    "a soft cap": (AttentionCase(100, 150, H=64, dtype="bfloat16", logits="large", arguments={"logits_soft_cap": 5.0, **CAUSAL}), None),
    "lengths, with padding that is no number, capped": (dataclasses.replace(LENGTHS, arguments={"logits_soft_cap": 1.0}), SMALL._replace(guess=False)),
    "rows that see nothing, and sinks": (AttentionCase(150, 150, H=64, dtype="bfloat16", arguments=CAUSAL | SINKS | {"causal_offset": -70}), SMALL),
    "numbers of segments in any order, capped": (AttentionCase(100, 100, H=128, dtype="float16", arguments={"scale": -0.3, "logits_soft_cap": 1.0, "query_segment_ids": np.arange(100, dtype=np.int32)[None] % 3, "key_value_segment_ids": np.arange(100, dtype=np.int32)[None] % 5}), None),
    "a head of 256": (AttentionCase(100, 256, H=256, dtype="bfloat16", arguments={"local_window_size": (40, 10)}), None),
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers(FORWARD, lambda name: name in [*FORWARD][:2]))
def test_forward(name):
    case, tiles = FORWARD[name]
    check_forward(interpreted(forward.forward, tiles=tiles), case)


@pytest.mark.parametrize(("logits", "most"), [("plain", 6e-7), ("equal", 3e-8)])
def test_a_soft_cap_costs_lse_no_digits(logits, most):
    case = AttentionCase(64, 256, H=64, dtype="bfloat16", logits=logits, arguments={"logits_soft_cap": 200.0})
    arrays, arguments = case.inputs()
    _, lse = interpreted(forward.forward, tiles=SMALL)(*arrays, **arguments)
    assert relative_error(lse, oracle(*arrays, **arguments)[1]) < most


TILES = schedule.Tiles(64, 128, 1)
FUSED, DELAYED, SPLIT = (TILES, None), (TILES._replace(delayed=True), None), (TILES, schedule.Tiles(128, 64, 1))
BACKWARD = {
    "documents": (DOCUMENTS, FUSED),
    "a window and an offset": (AttentionCase(170, 250, H=64, dtype="float16", arguments=WINDOW), DELAYED),
    "whole tiles of keys": (AttentionCase(170, 256, H=64, dtype="bfloat16", arguments=WINDOW), DELAYED),
    "a soft cap": (AttentionCase(100, 70, H=64, dtype="bfloat16", arguments=CAUSAL | {"logits_soft_cap": 1.0}), FUSED),
    "lengths, with padding that is no number": (LENGTHS, SPLIT),
    "lengths, fused": (LENGTHS, FUSED),
    "a window that ends with the keys": (Padded(150, 200, H=64, B=2, dtype="bfloat16", query_lengths=(150, 140), key_lengths=(60, 100), arguments={"local_window_size": (20, 10)}), FUSED),
    "a soft cap, delayed": (AttentionCase(100, 70, H=64, dtype="bfloat16", arguments={"scale": -0.3, "logits_soft_cap": 1.0}), DELAYED),
    "a soft cap and a window, split": (AttentionCase(100, 150, H=128, dtype="float16", arguments={"local_window_size": (50, 20), "logits_soft_cap": 1.0}), SPLIT),
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers(BACKWARD, lambda name: name in [*BACKWARD][:2]))
def test_gradients(name):
    check_gradients_of_kernels(*BACKWARD[name])


# Visible tiles


@pytest.mark.parametrize("own", ["queries", "keys"])
@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(300, 500, B=2, arguments={"local_window_size": (100, 50)}),
        AttentionCase(300, 500, B=3, query_lengths=(300, 0, 70), key_lengths=(400, 500, 64), arguments=CAUSAL),
        AttentionCase(400, 400, arguments=CAUSAL | documents(100, 128, 250, length=400)),
        AttentionCase(300, 300, arguments=CAUSAL | {"causal_offset": -100}),
        AttentionCase(400, 400, arguments=OUT_OF_ORDER),
    ],
    ids=["window", "lengths", "documents", "offset", "numbers out of order"],
)
def test_what_is_seen_is_listed_once(case, own):
    """First what is seen whole, the longest lists first; a mask compares segments wherever they hide a pair."""
    (*arrays, _), arguments = case.inputs()
    call = check_call(*arrays, arrays[1], **arguments)
    assert is_block_sparse(call)
    block_q, block_k = 64, 128
    seen, of_segments = pairs_seen(call)[:, 0], np.ones((case.B, case.T, case.S), bool)
    if (ids := call.extras.query_segment_ids) is not None:
        of_segments = np.asarray(ids)[:, :, None] == np.asarray(call.extras.key_segment_ids)[:, None]
    own_block, block = (block_q, block_k) if own == "queries" else (block_k, block_q)
    seen, of_segments = (table if own == "queries" else table.swapaxes(1, 2) for table in (seen, of_segments))
    rows = np.asarray(visible_tiles(call, block_q, block_k, own))
    assert len(rows) == case.B * -(-seen.shape[1] // own_block)
    assert (np.diff(rows[:, VisibleTiles._fields.index("length")]) <= 0).all()
    for number in range(len(rows)):
        visible = VisibleTiles.read(rows, number, call.problem)
        mine = (table[visible.b, visible.tile * own_block :][:own_block] for table in (seen, of_segments))
        mine, alike = ([part[:, i : i + block] for i in range(0, part.shape[1], block)] for part in mine)
        tiles = [int(visible.at(place)) for place in range(visible.length)]
        assert len({*tiles}) == len(tiles)
        assert {i for i, part in enumerate(mine) if part.any()} <= {*tiles}
        assert len(tiles) == 1 or (mine[min(tiles)].any() and mine[max(tiles)].any())
        assert all(mine[i].all() for i in tiles[: visible.whole])
        assert all(int(visible.is_mixed(i)) for i in tiles[visible.whole :] if not alike[i].all())


# Lowering


@pytest.mark.parametrize("arguments", [DOCUMENTS.arguments | SINKS, WINDOW | {"logits_soft_cap": 50.0}])
def test_both_passes_lower_for_cuda(arguments):
    case = dataclasses.replace(DOCUMENTS, arguments=arguments)
    passes = by_kernels(arguments, functools.partial(forward.forward, keeps_low_bits=True), backward.backward)
    text = passes.trace(case.inputs()[0], cotangents(case)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2
