"""CPU kernels for the operators that `torch.nn.attention.varlen` calls.

torch implements `aten::_flash_attention_forward` and `_flash_attention_backward` for GPUs only.
With these kernels, torch's Python wrapper, including its argument order and its autograd formula,
runs on a CPU. The kernels compute each sequence in float32 from the formulas.

Shape legend: T packed tokens, N packed sequences, H heads, L sequence length, K head_dim.
"""

import contextlib

import torch


def _split(bounds, *tensors):
    """Yield the (L, H, K) slices of each sequence of (T, H, K) tensors, in float32."""
    lengths = bounds.diff().tolist()
    yield from zip(*(tensor.float().split(lengths) for tensor in tensors), strict=True)


def _scores(q, k, scale):
    """Return the scores (H, L, L) of one sequence."""
    return torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)


def _check(query, bounds_q, bounds_k, max_q, max_k, dropout, is_causal):
    """Assert that the arguments are valid for the GPU kernel, and are those of an encoder."""
    assert bounds_q.dtype == bounds_k.dtype == torch.int32 and torch.equal(bounds_q, bounds_k)
    assert bounds_q[0] == 0 and bounds_q[-1] == len(query)
    assert type(max_q) is type(max_k) is int and max_q == max_k == bounds_q.diff().max()
    assert query.dim() == 3 and query.stride(-1) == 1
    assert dropout == 0.0 and not is_causal


def forward_kernel(calls):
    """Return a forward kernel that appends its dtype and options to `calls`."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, return_debug_mask, **options):
        _check(q, cu_q, cu_k, max_q, max_k, dropout, causal)
        calls.append({"dtype": q.dtype, **options})
        outputs = []
        logsumexps = []
        for query, key, value in _split(cu_q, q, k, v):
            scores = _scores(query, key, options.get("scale"))
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
            logsumexps.append(scores.logsumexp(-1))
        empty = torch.empty(0)
        state = torch.zeros(2, dtype=torch.uint64)
        return torch.cat(outputs).to(q.dtype), torch.cat(logsumexps, dim=1), state, empty, empty

    return forward


def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, *state, **options):
    """Compute the gradients of q, k and v from the output and the log-sum-exp (H, T)."""
    _check(q, cu_q, cu_k, max_q, max_k, dropout, causal)
    scale = options.get("scale")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    gradients = []
    logsumexps = lse.split(cu_q.diff().tolist(), dim=1)
    for (grad_out, query, key, value, output), logsumexp in zip(
        _split(cu_q, grad, q, k, v, out), logsumexps, strict=True
    ):
        weights = (_scores(query, key, scale) - logsumexp[..., None]).exp()
        grad_weights = torch.einsum("qhd,khd->hqk", grad_out, value)
        correction = (grad_out * output).sum(-1).T[..., None]
        grad_scores = weights * (grad_weights - correction) * factor
        gradients.append(
            (
                torch.einsum("hqk,khd->qhd", grad_scores, key),
                torch.einsum("hqk,qhd->khd", grad_scores, query),
                torch.einsum("hqk,qhd->khd", weights, grad_out),
            )
        )
    return tuple(torch.cat(parts).to(q.dtype) for parts in zip(*gradients, strict=True))


@contextlib.contextmanager
def varlen_on_cpu():
    """Register both kernels for the CPU, and yield the list of the forward calls' options."""
    calls = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward_kernel(calls), "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls
