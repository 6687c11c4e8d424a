"""Ring attention's printed thresholds, and Ulysses's volume against its paper's form."""

import pytest

from harness.ledger.context import (
    LINKS,
    least_block,
    least_sequence,
    ring_activation_bytes,
    ulysses_forward,
    vanilla_activation_bytes,
)
from harness.ledger.volumes import context_ring, ulysses

BY_NAME = {link.name: link for link in LINKS}


@pytest.mark.parametrize("name", ["A100 NVLink", "TPUv4 ICI"])
def test_printed_thresholds(name):
    link = BY_NAME[name]
    assert f"{least_block(link.flops_per_s, link.bytes_per_s) / 1e3:.1f}" == f"{link.printed_block / 1e3:.1f}"
    sequence = least_sequence(link.flops_per_s, link.bytes_per_s)
    assert f"{sequence / 1e3:.1f}" == f"{link.printed_sequence / 1e3:.1f}"


def test_infiniband_s_printed_numbers_follow_neither_from_its_bandwidth_nor_from_each_other():
    """24.5k and 149.5k are printed; F / B makes 24.96k and 149.76k. They agree within 2 % and 0.2 %."""
    link = BY_NAME["A100 InfiniBand"]
    block, sequence = (f(link.flops_per_s, link.bytes_per_s) for f in (least_block, least_sequence))
    assert (block, sequence) == (24_960, 149_760)
    assert block != link.printed_block and block == pytest.approx(link.printed_block, rel=0.02)
    assert sequence != link.printed_sequence and sequence == pytest.approx(link.printed_sequence, rel=0.002)
    assert 6 * link.printed_block != link.printed_sequence


def test_a_causal_mask_asks_for_twice_the_block():
    assert least_block(312e12, 300e9, causal=True) == 2 * least_block(312e12, 300e9)


def test_activations_do_not_grow_with_the_sequence():
    assert ring_activation_bytes(b=2, c=128, h=64) == 98_304
    assert vanilla_activation_bytes(b=2, s=256, n=4) / vanilla_activation_bytes(b=2, s=128, n=4) == 4


def test_ulysses_is_its_paper_s_for_many_ranks():
    b, s, h, p = 1, 4096, 512, 1024
    mine = ulysses_forward(b, s, h, h, bytes_each=1, p=p)
    assert float(mine) == pytest.approx(float(ulysses(s, h, p)), rel=2 / p)
    assert mine < ulysses(s, h, p)


def test_ulysses_sends_less_than_a_ring_where_heads_are_many():
    """(2 h + 2 h_kv) / P against 2 h_kv, for h_kv = h: from three ranks on."""
    args = {"b": 1, "s": 960, "kv_width": 64, "bytes_each": 2}
    for ranks in (2, 3, 8):
        ring = context_ring(**args, cp=ranks)
        other = ulysses_forward(**args, h=64, p=ranks)
        assert other / ring == pytest.approx(2 / ranks)
