"""Samples of linear algebra, Fourier transforms, norms, distances and special functions, to prove their rules.

Batches of 4 matrices are uneven over 3 ranks, batches of 2 leave one empty; some broadcast.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own short name
from torch import Tensor

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
T = torch.Tensor
L = torch.linalg


def S(func: Any, *args: Any, **kwargs: Any) -> Call:  # noqa: N802  # short, for long tables
    return func, args, kwargs


def r(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def c(*shape: int) -> Tensor:
    return torch.complex(r(*shape), r(*shape, seed=1))


def square(*shape: int) -> Tensor:
    """A matrix far from singular."""
    return r(*shape, shape[-1]) + 4 * torch.eye(shape[-1], dtype=torch.float64)


def definite(*shape: int) -> Tensor:
    half = square(*shape)
    return half @ half.mT / 4


def lower(*shape: int) -> Tensor:
    return torch.linalg.cholesky(definite(*shape))


def lu(*shape: int) -> tuple[Tensor, Tensor]:
    factors = torch.linalg.lu_factor(square(*shape))
    return factors.LU, factors.pivots


def ldl(*shape: int) -> tuple[Tensor, Tensor]:
    factors = torch.linalg.ldl_factor(definite(*shape))
    return factors.LD, factors.pivots


def reflectors(*shape: int) -> tuple[Tensor, Tensor]:
    factors = torch.geqrf(r(*shape))
    return factors.a, factors.tau


ON_SQUARES = {
    "linalg_inv": L.inv, "linalg_inv_ex": L.inv_ex, "inverse": torch.inverse, "linalg_det": L.det, "det": torch.det,
    "linalg_slogdet": L.slogdet, "slogdet": torch.slogdet, "linalg_matrix_exp": L.matrix_exp,
    "matrix_exp": torch.matrix_exp, "linalg_cond": L.cond, "linalg_eigvals": L.eigvals,
}  # fmt: skip
ON_DEFINITES = {
    "cholesky": torch.cholesky, "linalg_cholesky": L.cholesky, "linalg_cholesky_ex": L.cholesky_ex,
    "logdet": torch.logdet, "linalg_eigvalsh": L.eigvalsh, "linalg_ldl_factor": L.ldl_factor,
    "linalg_ldl_factor_ex": L.ldl_factor_ex,
}  # fmt: skip
ON_MATRICES = {
    "linalg_lu_factor": L.lu_factor, "linalg_lu_factor_ex": L.lu_factor_ex, "_lu_with_info": torch._lu_with_info,
    "lu": torch.lu, "linalg_lu": L.lu, "qr": torch.qr, "linalg_qr": L.qr, "svd": torch.svd, "linalg_svdvals": L.svdvals,
    "linalg_matrix_rank": L.matrix_rank, "linalg_pinv": L.pinv, "pinverse": torch.pinverse,
}  # fmt: skip
UNDIFFERENTIATED = {"geqrf": torch.geqrf, "linalg_eig": L.eig, "linalg_eigh": L.eigh, "linalg_svd": L.svd}

_lu4, _lu2 = lu(4, 3), lu(2, 3)
_b = r(4, 3, 2)

SAMPLES: dict[str, list[Call]] = {
    **{name: [S(f, square(4, 3)), S(f, square(2, 2, 2)), S(f, square(3))] for name, f in ON_SQUARES.items()},
    **{name: [S(f, definite(4, 3)), S(f, definite(2, 2))] for name, f in ON_DEFINITES.items()},
    **{name: [S(f, r(4, 3, 2)), S(f, r(2, 2, 2))] for name, f in ON_MATRICES.items()},
    **{name: [S(f, definite(4, 3)), S(f, definite(2, 2))] for name, f in UNDIFFERENTIATED.items()},
    "linalg_matrix_power": [S(L.matrix_power, square(4, 3), 3), S(L.matrix_power, square(2, 3), -2)],
    "matrix_power": [S(torch.matrix_power, square(4, 3), 2)],
    "cholesky_inverse": [S(torch.cholesky_inverse, lower(4, 3)), S(torch.cholesky_inverse, lower(2, 3), upper=True)],
    "cholesky_solve": [S(torch.cholesky_solve, _b, lower(4, 3)), S(torch.cholesky_solve, r(3, 4), lower(2, 3))],
    "lu_solve": [S(torch.lu_solve, _b, *_lu4)],
    "linalg_lu_solve": [
        S(L.lu_solve, *_lu4, _b), S(L.lu_solve, *_lu2, r(2, 4, 3), left=False),
        S(L.lu_solve, *_lu4, r(3, 4), adjoint=True),
    ],
    "lu_unpack": [
        S(torch.lu_unpack, *_lu4), S(torch.lu_unpack, *_lu2), S(torch.lu_unpack, *_lu4, unpack_pivots=False),
    ],
    "linalg_ldl_solve": [S(L.ldl_solve, *ldl(4, 3), _b)],
    "orgqr": [S(torch.orgqr, *reflectors(4, 3, 2))],
    "linalg_householder_product": [S(L.householder_product, *reflectors(4, 3, 2))],
    "ormqr": [
        S(torch.ormqr, *reflectors(4, 3, 3), _b), S(torch.ormqr, *reflectors(3, 3), r(4, 3), left=False),
        S(torch.ormqr, *reflectors(2, 3, 3), r(2, 3, 4), transpose=True),
    ],
    "triangular_solve": [S(torch.triangular_solve, _b, lower(4, 3), upper=False)],
    "linalg_solve": [
        S(L.solve, square(4, 3), _b), S(L.solve, square(4, 3), r(4, 3)), S(L.solve, square(3), B=r(4, 3, 2)),
        S(L.solve, square(2, 3), r(2, 4, 3), left=False), S(L.solve, square(1, 3), r(4, 3, 2)),
        S(L.solve, square(9, 3), r(3, 3)), S(L.solve, square(3, 3), r(3, 9)), S(L.solve, square(9, 3), B=r(3, 3)),
    ],
    "linalg_solve_ex": [
        S(L.solve_ex, square(4, 3), _b), S(L.solve_ex, square(3), r(3, 4)), S(L.solve_ex, square(9, 3), r(3, 3)),
    ],
    "linalg_solve_triangular": [
        S(L.solve_triangular, lower(4, 3), _b, upper=False),
        S(L.solve_triangular, lower(3), r(2, 4, 3), upper=False, left=False),
    ],
    "linalg_lstsq": [
        S(L.lstsq, r(4, 3, 2), r(4, 3, 5), driver="gels"), S(L.lstsq, r(2, 2, 3), r(2, 2, 4), driver="gelsy"),
        S(L.lstsq, r(4, 2, 3), r(4, 2), driver="gelss"), S(L.lstsq, r(4, 3, 2), r(4, 3, 5), driver="gelsd"),
        S(L.lstsq, r(4, 3, 2), r(4, 3, 5)),
    ],
    "linalg_vander": [S(L.vander, r(4, 5)), S(L.vander, r(2), N=3)],
    "vander": [S(torch.vander, torch.arange(5)), S(torch.vander, torch.arange(4), 2, increasing=True)],
    # contractions
    "addmm": [S(torch.addmm, r(1), r(4, 5), r(5, 2), beta=0.5), S(torch.addmm, r(), r(4, 5), r(5, 2), alpha=2)],
    "addmv": [S(torch.addmv, r(), r(4, 5), r(5), beta=3)],
    "addbmm": [S(torch.addbmm, r(2), r(4, 3, 5), r(4, 5, 2)), S(torch.addbmm, r(3, 1), r(4, 3, 5), r(4, 5, 2))],
    "baddbmm": [
        S(torch.baddbmm, shape, r(4, 5, 2), r(4, 2, 5), alpha=2, beta=0.5) for shape in (r(5, 5), r(1, 5), r(5), r())
    ],
    "addr": [S(torch.addr, r(2), r(4), r(2), beta=2), S(torch.addr, r(4, 1), vec1=r(4), vec2=r(5))],
    "inner": [S(torch.inner, r(4, 5), r(2, 5)), S(torch.inner, r(5), r(5)), S(torch.inner, r(4), r())],
    "tensordot": [
        S(torch.tensordot, r(4, 2, 5), r(2, 5, 3)), S(torch.tensordot, r(4, 5), r(5, 2), dims=1),
        S(torch.tensordot, r(4, 5), r(2, 4), dims=([0], [1])), S(torch.tensordot, r(4, 5), r(2), dims=0),
        S(torch.tensordot, r(4, 5), r(1, 2), dims=([1], [0])),
        S(torch._C._VariableFunctions.tensordot, r(4), r(4), [0], [0]),
    ],
    "linalg_multi_dot": [
        S(L.multi_dot, [r(4, 5), r(5, 2)]), S(L.multi_dot, [r(4), r(4, 5), r(5, 2), r(2)]),
        S(L.multi_dot, [r(1, 4), r(4, 5), r(5, 2)]),
    ],
    "chain_matmul": [S(torch.chain_matmul, r(4, 5), r(5, 2), r(2, 3))],
    "linalg_vecdot": [
        S(L.vecdot, r(4, 5), r(4, 5, seed=1)), S(L.vecdot, c(4, 5), c(5), dim=-1), S(L.vecdot, r(4, 1), r(4, 5), dim=0),
    ],
    "cross": [S(torch.cross, r(7, 3), r(7, 3, seed=1)), S(torch.cross, r(3, 9), r(3, 9, seed=1))],
    "bilinear": [
        S(F.bilinear, r(4, 2), r(4, 5), r(3, 2, 5), r(3)), S(F.bilinear, r(2, 2, 4), r(2, 2, 1), r(1, 4, 1)),
    ],
    "block_diag": [S(torch.block_diag, r(4, 2), r(3), r(), r(1, 5))],
    "kron": [
        S(torch.kron, r(6, 2), r(2, 5)), S(torch.kron, r(4), r(2, 3)), S(torch.kron, r(4, 1), r(5)),
        S(torch.kron, r(3), r(1)),
    ],
    "einsum": [
        S(torch.einsum, "iij->ij", r(4, 4, 5)), S(torch.einsum, "ii,ij->j", r(4, 4), r(4, 5)),
        S(torch.einsum, "bii->b", r(4, 2, 2)),
    ],
    # norms and distances
    "linalg_vector_norm": [
        S(L.vector_norm, r(4, 5), ord, dim, keepdim)
        for ord in (0, 1, 2, 3, 0.5, -1, float("inf"), float("-inf")) for dim, keepdim in ((0, False), (None, True))
    ],
    "linalg_matrix_norm": [
        S(L.matrix_norm, r(4, 3, 2), ord, dim, keepdim)
        for ord in ("fro", "nuc", 1, -1, 2, -2, float("inf")) for dim, keepdim in (((-2, -1), False), ((2, 0), True))
    ],
    "cdist": [
        S(torch.cdist, r(4, 3), r(5, 3)), S(torch.cdist, r(2, 4, 3), r(1, 5, 3), p=1.0),
        S(torch.cdist, r(30, 3), r(30, 3, seed=1)), S(torch.cdist, r(4, 3), r(2, 5, 3), 3.0),
        S(torch.cdist, r(27, 3), r(4, 3), compute_mode="donot_use_mm_for_euclid_dist"),
    ],
    "pdist": [S(F.pdist, r(4, 5), 1.0), S(F.pdist, r(4, 5))],
    "renorm": [S(torch.renorm, 2 * r(4, 5), 2, 0, 1.0), S(T.renorm_, 2 * r(4, 5), 1, 1, 1.0)],
    "amax": [S(torch.amax, r(2, 4)), S(torch.amax, r(4, 1), 1), S(torch.amax, r(4, 2) > 0, 1)],
    # Fourier
    **{
        f"fft_{kind}": [S(getattr(torch.fft, kind), x, dim=0), S(getattr(torch.fft, kind), x, 3, norm="ortho")]
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
        for x in [(c if kind in ("ifft", "irfft", "hfft") else r)(4, 5)]
    },
    **{
        f"fft_{kind}{many}": [S(getattr(torch.fft, kind + many), x), S(getattr(torch.fft, kind + many), x, dim=(0, 1))]
        for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for many in "2n"
        for x in [(c if kind in ("ifft", "irfft", "hfft") else r)(2, 5, 4)]
    },
    "fft_fftshift": [S(torch.fft.fftshift, r(4, 5)), S(torch.fft.fftshift, r(4, 2), dim=0)],
    "fft_ifftshift": [S(torch.fft.ifftshift, r(4, 5), dim=[1]), S(torch.fft.ifftshift, r(2))],
    "stft": [
        S(torch.stft, r(4, 16), 4, window=r(4), return_complex=True),
        S(torch.stft, r(16), 4, 2, window=r(4), center=False, return_complex=True),
    ],
    "istft": [
        S(torch.istft, c(4, 3, 5), 4, window=torch.ones(4, dtype=torch.float64)),
        S(torch.istft, c(2, 3, 5), 4, 2, window=torch.ones(4, dtype=torch.float64), length=7),
        S(torch.istft, c(3, 5), 4, 2, window=torch.ones(4, dtype=torch.float64), center=False),
    ],
    # pointwise
    "conj_physical": [S(torch.conj_physical, c(4, 2)), S(torch.conj_physical, r(4, 2)), S(T.conj_physical_, c(4))],
    "chalf": [S(T.chalf, torch.arange(8).reshape(4, 2))],
    "lerp": [S(torch.lerp, r(4, 2), r(4, 2, seed=1), r(2)), S(torch.lerp, r(4), weight=r(4), end=r(4, seed=2))],
}  # fmt: skip

ONE = """airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 gammaln i0 modified_bessel_i0 modified_bessel_i1
modified_bessel_k0 modified_bessel_k1 psi scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0"""
TWO = """chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w"""
for _name in ONE.split():
    SAMPLES[f"special_{_name}"] = [S(getattr(torch.special, _name), x) for x in (0.2 + r(4, 2).abs(), r(2).abs() + 1)]
for _name in TWO.split():
    _degrees = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    SAMPLES[f"special_{_name}"] = [S(getattr(torch.special, _name), r(4, 3).tanh(), n) for n in (3, _degrees)]
SAMPLES["special_gammainc"] = [S(torch.special.gammainc, r(4, 2).abs() + 1, r(2).abs())]
SAMPLES["special_gammaincc"] = [S(torch.special.gammaincc, r(4, 2).abs() + 1, r(2).abs())]
SAMPLES["special_multigammaln"] = [S(torch.special.multigammaln, r(4, 2).abs() + 3, 2)]
SAMPLES["special_polygamma"] = [S(torch.special.polygamma, 2, r(4, 2).abs() + 1)]

with warnings.catch_warnings():  # deprecation warnings, raised once
    warnings.simplefilter("ignore")
    for _name in ("cholesky", "lu", "_lu_with_info", "qr", "lu_solve", "triangular_solve", "chain_matmul", "cross"):
        for _func, _args, _kwargs in SAMPLES[_name]:
            _func(*_args, **_kwargs)
