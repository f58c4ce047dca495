"""Clusters of a bank's rows, and the close sets they give (LA, Cave, Ring(+C_i); METHODS, section 3)."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from hardneg import checks
from hardneg.checks import whole
from hardneg.matmul import exact_products, where_precise
from hardneg.memory import kmeans

BACKENDS = ("auto", "faiss", "torch")


class Clusters(checks.Fixed, nn.Module):
    """Several clusterings of N rows by spherical k-means; the close set of a row is the union of its clusters.

    A row is in its own close set. For negatives from the same cluster (Cave) take it out by ``exclude``:
    ``loss(z, bank[idx], negatives=bank.rows, negative_mask=clusters.same(idx), exclude=idx)``; where members are
    positives (LA, Ring(+C_i)) it belongs there.

    Args:
        k: clusters of each clustering
        repeats: clusterings, which differ in their seeds
        seed: with the step of `fit`, what the clusters depend on beside the rows and the backend
        iterations: most moves of the centroids
        backend: ``"faiss"`` (on the CPU), ``"torch"`` (where the rows are), or ``"auto"``: faiss for rows on the CPU
            if it is installed

    Examples:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> clusters = Clusters(k=2, backend="torch").fit(rows)
        >>> clusters.same(torch.tensor([0]))
        tensor([[ True,  True, False]])
        >>> clusters.members(torch.tensor([0, 2]))
        tensor([[ 0,  1],
                [ 2, -1]])
    """

    def __init__(self, k: int, repeats: int = 1, seed: int = 0, iterations: int = 20, backend: str = "auto") -> None:
        super().__init__()
        whole("k", k)
        whole("repeats", repeats)
        whole("iterations", iterations)
        checks.choice("backend", backend, BACKENDS)
        if backend == "faiss" and not kmeans.faiss_is_installed():
            raise ImportError('backend="faiss" needs faiss: pip install "hardneg[mine]", or choose backend="torch"')
        self.k, self.repeats, self.seed, self.iterations, self.backend = k, repeats, seed, iterations, backend
        self.fitted_at: int | None = None
        self.assignments: Tensor
        self.register_buffer("assignments", torch.empty(repeats, 0, dtype=torch.int32))  # (repeats, N)
        self._lists: tuple[Tensor, Tensor] | None = None

    def fit(self, rows: Tensor, step: int = 0) -> Self:
        """Cluster the rows; returns itself.

        rows: (N, d) with N ≥ k, of any length, such as ``bank.rows`` · step: of training; another step, other seeds
        """
        checks.floating("rows", rows)
        if rows.dim() != 2 or rows.shape[1] == 0:
            raise ValueError(f"rows must have shape (N, d), got {tuple(rows.shape)}")
        if len(rows) < self.k:
            raise ValueError(f"k={self.k} clusters need as many rows, got {len(rows)}: lower k")
        rows = where_precise(rows.detach())
        if not bool(torch.stack(torch.aminmax(rows)).isfinite().all()):
            raise ValueError("rows holds NaN or inf: look for a diverged model before clustering")
        whole("step", step, at_least=0)
        backend = self.backend
        if backend == "auto":
            backend = "faiss" if rows.device.type == "cpu" and kmeans.faiss_is_installed() else "torch"
        with exact_products(rows.device):
            units = kmeans.units(rows)
            found = [
                kmeans.cluster(units, self.k, self.iterations, (self.seed, step, repeat), backend)
                for repeat in range(self.repeats)
            ]
        self.assignments = torch.stack(found).to(self.assignments)
        self.fitted_at, self._lists = step, None
        return self

    def refresh(self, rows: Tensor, step: int, every: int) -> bool:
        """Cluster the rows if that was never done, or ``every`` steps ago or more; returns whether it did."""
        whole("every", every)
        due = self.fitted_at is None or step - self.fitted_at >= every
        if due:
            self.fit(rows, step)
        return due

    def same(self, idx: Tensor, among: Tensor | None = None) -> Tensor:
        """Whether rows are in the close sets of these rows, (B, N) bool; a row is in its own.

        idx: (B,) indices of rows · among: (M,) or (B, M) indices of the rows to ask about (default: all N), such as
        those drawn as negatives; then (B, M)
        """
        idx = self._indices("idx", idx, (1,))
        others = None if among is None else self._indices("among", among, (1, 2))
        if others is not None and others.dim() == 2 and len(others) != len(idx):
            raise ValueError(f"among must have shape (M,) or ({len(idx)}, M), got {tuple(others.shape)}")
        mask: Tensor | None = None
        for clustering in self.assignments:
            theirs = clustering if others is None else clustering[others]  # (N,), (M,) or (B, M)
            together = clustering[idx, None] == theirs  # (B, N) or (B, M)
            mask = together if mask is None else mask.logical_or_(together)
        assert mask is not None
        return mask

    def members(self, idx: Tensor) -> Tensor:
        """The close sets of these rows as lists, in O(B·L): (B, L) indices, ascending, the rest of a shorter list −1.

        idx: (B,) indices of rows · L: size of the largest of these close sets
        """
        idx = self._indices("idx", idx, (1,))
        order, starts = self._inverted()
        size = order.shape[1]
        own = self.assignments[:, idx].long()  # (repeats, B)
        first = starts.gather(1, own)
        count = starts.gather(1, own + 1) - first
        place = torch.arange(int(count.max()) if len(idx) else 0, device=order.device)
        at = (first[:, :, None] + place).clamp_(max=size - 1)  # (repeats, B, L)
        found = order.gather(1, at.flatten(1)).view_as(at)
        found.masked_fill_(place >= count[:, :, None], size)  # what is not there sorts last
        lists = found.transpose(0, 1).flatten(1)  # (B, repeats·L)
        if self.repeats > 1:
            lists = lists.sort(dim=1).values
            lists[:, 1:].masked_fill_(lists[:, 1:] == lists[:, :-1], size)  # in several clusters of the union
            lists = lists.sort(dim=1).values
            lists = lists[:, : int((lists < size).sum(dim=1).max()) if len(idx) else 0]
        return lists.masked_fill(lists == size, -1)

    def get_extra_state(self) -> Tensor:
        """The number of clusters, and the step at which they were made (−1: not yet)."""
        return torch.tensor([self.k, -1 if self.fitted_at is None else self.fitted_at])

    def set_extra_state(self, state: Tensor) -> None:
        """Take back what `get_extra_state` gave."""
        k, step = (int(number) for number in state)
        if k != self.k:
            raise ValueError(f"the state holds clusterings with k={k}, but k={self.k} here: build Clusters(k={k})")
        self.fitted_at = None if step < 0 else step

    def extra_repr(self) -> str:
        return f"k={self.k}, repeats={self.repeats}, rows={self.assignments.shape[1]}, backend={self.backend!r}"

    def _inverted(self) -> tuple[Tensor, Tensor]:
        """Rows in order of cluster, (repeats, N), and where each cluster starts there, (repeats, k + 1)."""
        if self._lists is None or self._lists[0].device != self.assignments.device:
            ordered, order = self.assignments.sort(dim=1, stable=True)
            edges = torch.arange(self.k + 1, device=order.device, dtype=ordered.dtype)
            self._lists = order, torch.searchsorted(ordered, edges.expand(self.repeats, -1).contiguous())
        return self._lists

    def _indices(self, name: str, idx: Tensor, dimensions: tuple[int, ...]) -> Tensor:
        if self.fitted_at is None:
            raise ValueError("there are no clusters yet: call fit(bank.rows) first")
        shape = tuple(idx.shape) if isinstance(idx, Tensor) and idx.dim() in dimensions else (-1,)
        idx = checks.integers(name, idx, shape, "indices of rows")
        checks.in_range(name, idx, self.assignments.shape[1])
        return idx.to(self.assignments.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state_dict.get(f"{prefix}assignments")
        if stored is not None and len(stored) == self.repeats:
            # How many rows there are is known from the first fit on, which a resumed run has not made.
            self.assignments = self.assignments.new_empty(stored.shape)
        self._lists = None
        super()._load_from_state_dict(state_dict, prefix, *rest)
