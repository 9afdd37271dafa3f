"""Products, norms and activations against float64 and the reference, bit for bit the same in every batch."""

import pytest

torch = pytest.importorskip("torch")

from engine_svc.model.ops import NormWeight  # noqa: E402 - after importorskip
from engine_svc.model.reference_ops import ReferenceOps  # noqa: E402
from tests.support.kernel_variants import VARIANTS, poisoned_ops  # noqa: E402

pytestmark = pytest.mark.model

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3}


@pytest.fixture(params=VARIANTS)
def ops(request):
    return poisoned_ops(request.param)


def randn(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, (64, 16, 16)), (96, (40, 7)), (576, (1000,)), (130, (1,)), (16, (333, 500))])
def test_linear(ops, dtype, shape) -> None:
    in_size, out_sizes = shape
    weights = [randn(size, in_size, dtype=dtype, seed=size) / in_size**0.5 for size in out_sizes]
    for biases in ([], [randn(size, dtype=dtype, seed=1) for size in out_sizes]):
        packed = ops.pack_linear(weights, biases)
        x = randn(75, in_size, dtype=dtype, seed=2)
        expected = x.double() @ torch.cat(weights).double().T + (torch.cat(biases).double() if biases else 0)
        whole = ops.linear(x, packed)
        assert whole.dtype is dtype
        torch.testing.assert_close(whole.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        logits = ops.logits(x, packed, 3.0, 2.0)
        capped = torch.tanh(expected / 2 / 3) * 3
        torch.testing.assert_close(logits.double(), capped, rtol=1e-4, atol=1e-4)
        for rows in (1, 2, 3, 4, 5, 7, 8, 11, 13, 40):
            assert torch.equal(ops.linear(x[:rows], packed), whole[:rows])
            assert torch.equal(ops.linear(x[-rows:], packed), whole[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 100])
def test_norms(ops, dtype, size) -> None:
    norm = NormWeight(weight=randn(size, dtype=torch.float32, seed=3), eps=1e-5)
    x, residual = randn(70, size, dtype=dtype, seed=4), randn(70, size, dtype=dtype, seed=5)
    reference = ReferenceOps()
    normed, total = ops.add_rms_norm(x, residual, norm)
    expected, expected_total = reference.add_rms_norm(x, residual, norm)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(ops.rms_norm(x, norm), reference.rms_norm(x, norm), rtol=TOLERANCE[dtype], atol=1e-5)
    for row in (0, 33, 69):
        alone, _ = ops.add_rms_norm(x[row : row + 1], residual[row : row + 1], norm)
        assert torch.equal(alone, normed[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations(ops, dtype, activation) -> None:
    gate_up = randn(50, 2 * 300, dtype=dtype, seed=6) * 4
    gate_up[0, :4] = torch.tensor([1000.0, -1000.0, 90.0, -90.0])
    got = ops.activation_and_mul(gate_up, activation)
    expected = ReferenceOps().activation_and_mul(gate_up.double(), activation)
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=2e-5)
    assert torch.equal(ops.activation_and_mul(gate_up[7:8], activation), got[7:8])


def test_not_a_number_stays_one(ops) -> None:
    for dtype in DTYPES:
        x = randn(2, 64, dtype=dtype)
        x[0, 3] = float("nan")
        norm = NormWeight(weight=torch.ones(64), eps=1e-5)
        assert ops.rms_norm(x, norm)[0].isnan().all()
        for activation in ("silu", "gelu_tanh"):
            assert ops.activation_and_mul(x, activation)[0, 3].isnan()
        logits = ops.logits(x, ops.pack_linear([randn(20, 64, dtype=dtype)]), None, 1.0)
        assert logits[0].isnan().all()
        assert not logits[1].isnan().any()
