"""
Training with PyTorch
=====================

:mod:`flashkit.torch` is differentiable: a module of PyTorch trains with it as with ``scaled_dot_product_attention``,
and takes the masks and biases that this function takes only as dense tensors. This page shows the program; PyTorch is
not part of the environment that builds the site.
"""

import torch
import torch.nn.functional as F

from flashkit import torch as ft

torch.manual_seed(0)

# %%
# A layer whose heads prefer near tokens (ALiBi) and see a window of the past. Both are keyword arguments: no matrix of
# biases, no mask of tokens by tokens.


class Layer(torch.nn.Module):
    def __init__(self, width: int, heads: int, reach: int) -> None:
        super().__init__()
        self.heads, self.reach = heads, reach
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (batch, heads, tokens, dim)
        y = ft.attention(q, k, v, causal=True, window=(self.reach, 0), alibi_slopes=self.slopes)
        return x + self.out(y.transpose(1, 2).flatten(-2))


# %%
# A task that needs attention: each token is the sum of the numbers at its own place and at the place before.

layer = Layer(32, 4, reach=16)
embed, head = torch.nn.Linear(1, 32), torch.nn.Linear(32, 1)
parameters = [*layer.parameters(), *embed.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)

losses = []
for _ in range(60):
    numbers = torch.randn(8, 40, 1)
    wanted = numbers + F.pad(numbers, (0, 0, 1, 0))[:, :-1]
    loss = F.mse_loss(head(layer(embed(numbers))), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} at last")

# %%
# The gradients are those of the plain computation, whose mask and biases are a dense tensor.

q, k, v = (torch.randn(2, 4, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
distance = torch.arange(40)[:, None] - torch.arange(40)
bias = -layer.slopes.double()[:, None, None] * distance.abs()
bias = bias.masked_fill((distance < 0) | (distance > 16), -torch.inf)

own = ft.attention(q, k, v, causal=True, window=(16, 0), alibi_slopes=layer.slopes)
plain = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (own, plain)]
difference = max(float((x - y).abs().max()) for x, y in zip(*gradients, strict=True))
print(f"largest difference of the gradients: {difference:.0e}")
assert difference < 1e-12 and losses[-1] < 0.5 * losses[0]
