"""The definition of attention, and FlashAttention in plain NumPy. Everything in flashkit is tested against it.

Attention of one head, for queries q (Nq, D), keys k (Nk, D), values v (Nk, Dv):

    S = scale * q k^T        scores
    S = modify(S)            the score modification; -inf where the mask hides a key
    P = softmax(S)           over the keys
    O = P v                  lse = log(rowsum(exp(S)))

`standard` computes these formulas and stores the Nq x Nk matrix S. FlashAttention gets the same result with one tile of
S at a time, by an online softmax. Of the keys seen so far each row keeps

    m        row_max, the greatest score
    l        row_sum, the sum of exp(S - m)
    o_acc    the sum of exp(S - m) * v

A new tile that raises m multiplies l and o_acc by exp(m_old - m_new). At the end O = o_acc / l and lse = m + log(l).
The backward pass does not store P either. It recomputes S tile by tile, and P = exp(S - lse). With
delta = rowsum(dO * O):

    dP = dO v^T    dS = P * (dP - delta)    dq = scale * dS k    dk = scale * dS^T q    dv = P^T dO

A score modification multiplies the dS of q and k by its slope, d modify(s) / d s. A value that it reads, such as an
element of a bias, has as its gradient the sum of dS * d modify(s) / d value over the pairs that read it.

FlashAttention-1 (Dao et al. 2022, arXiv 2205.14135, Algorithms 1 and 4) loops over tiles of K and V outside and of Q
inside, so O, m and l of all queries are read and written for each tile of keys. FlashAttention-2 (Dao 2023, arXiv
2307.08691, Algorithms 1 and 2) loops over tiles of Q outside: o_acc, m and l stay in fast memory until the row is done,
and only O and lse are written. Here fast memory is a local variable, slow memory an array behind `load_tile` and
`store_tile`, and `Traffic` counts what moves between them.

The steps have the same names in every backend: load_tile, scores, modify, online_softmax, accumulate, epilogue.

At the edges, here and in every backend:
- A row without a visible key has O = 0, lse = -inf (with a sink: the sink's logit) and gradients 0.
- Masked keys never affect the result, even if they hold NaN or inf; nor do keys past kv_lengths.
- NaN in a visible input gives NaN in O and lse of the rows that see it, and in no other. A score of +inf gives NaN in
  its row (inf - inf).
"""

from .algorithms import *
from .definition import *
from .heads import *
from .steps import *
