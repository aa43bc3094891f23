"""Requests of a trace side by side: what each row does is what its request did."""

import itertools

import numpy as np

from oled_jax.passes import PassKind
from oled_jax.traces.batch import stack_requests
from oled_jax.traces.spec import make_spec
from oled_jax.traces.synthetic import synthesise


def test_a_row_is_its_request():
    spec = make_spec(
        num_layers=2, num_experts=16, top_k=2, block_length=4, requests=5, iterations=None, blocks=2, prompt_tokens=8,
        targets={"distinct_experts": 6.0},
    )  # fmt: skip
    trace = synthesise(spec)
    requests = [list(passes) for _, passes in itertools.groupby(trace, lambda step: int(step.request_ids[0]))]
    lengths = [len(passes) for passes in requests]
    stacked = stack_requests(trace, 2)
    assert len(stacked) == max(lengths[:2]) + max(lengths[2:4])  # the fifth makes no whole batch
    assert [len(step.prompts) for step in stacked if step.prompts] == [2, 2]
    for number, step in enumerate(stacked.passes[: max(lengths[:2])]):
        assert step.request_ids.tolist() == [0, 1]
        for row in (0, 1):
            T = step.info.token_ids.size // 2
            span = slice(row * T, (row + 1) * T)
            if number >= lengths[row]:
                assert not step.info.token_mask[span].any()
                assert not step.outcome.written[span].any()
                continue
            alone = requests[row][number]
            np.testing.assert_array_equal(step.expert_ids[:, span], alone.expert_ids)
            np.testing.assert_array_equal(step.info.masked[span], alone.info.masked)
            np.testing.assert_array_equal(step.outcome.written[span], alone.outcome.written)
            assert step.block_starts[row] == alone.block_starts[0]
    kinds = {step.info.kind for step in stacked}
    assert kinds <= {PassKind.PREFILL, PassKind.DENOISE, PassKind.COMMIT}
