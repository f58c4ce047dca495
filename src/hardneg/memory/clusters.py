"""Clusters of the rows of a bank, and the close neighbors they give (LA, Cave, Ring(+C_i); METHODS, section 3)."""

from typing import Any, Self

import torch
from torch import Tensor

from hardneg import checks
from hardneg.checks import TensorLike, as_tensor, whole
from hardneg.matmul import exact_products, where_precise
from hardneg.memory import kmeans
from hardneg.memory.module import MemoryModule

BACKENDS = ("auto", "faiss", "torch")


class Clusters(checks.Fixed, MemoryModule):
    """Several clusterings of N rows by spherical k-means; the close neighbors of a row are the union of its clusters.

    A row is one of its own close neighbors. For negatives from the same cluster (Cave) remove it by ``exclude``:
    ``loss(z, bank[idx], negatives=bank.rows, negative_mask=clusters.same(idx), exclude=idx)``. Where close neighbors
    are positives (LA, Ring(+C_i)), the row itself is a positive too.

    Args:
        k: clusters of each clustering
        repeats: number of clusterings, each with another seed
        seed: of the initial centroids, with the step of `fit`
        iterations: maximum number of updates of the centroids
        backend: ``"faiss"`` (on the CPU), ``"torch"`` (on the device of the rows), or ``"auto"``: faiss for rows on the
            CPU if it is installed

    Examples:
        >>> rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> clusters = Clusters(k=2, backend="torch").fit(rows)
        >>> clusters.same(torch.tensor([0]))
        tensor([[ True,  True, False]])
        >>> clusters.members(torch.tensor([0, 2]))
        tensor([[ 0,  1],
                [ 2, -1]])
    """

    tensors = ("assignments",)

    def __init__(self, k: int, repeats: int = 1, seed: int = 0, iterations: int = 20, backend: str = "auto") -> None:
        super().__init__()
        self.k, self.repeats = whole("k", k), whole("repeats", repeats)
        self.iterations = whole("iterations", iterations)
        checks.choice("backend", backend, BACKENDS)
        if backend == "faiss" and not kmeans.faiss_is_installed():
            raise ImportError('backend="faiss" needs faiss: pip install "hardneg[mine]", or choose backend="torch"')
        self.seed, self.backend = seed, backend
        self.fitted_at: int | None = None  # step of the last fit
        self.assignments = torch.empty(self.repeats, 0, dtype=torch.int32)  # (repeats, N)
        self._cluster_lists: tuple[Tensor, Tensor] | None = None

    def fit(self, rows: TensorLike, step: int = 0) -> Self:
        """Cluster the rows; return self.

        rows: (N, d) with N ≥ k, of any norm, such as ``bank.rows`` · step: of training, which the initial centroids
        depend on
        """
        rows = checks.floating("rows", as_tensor("rows", rows))
        if rows.dim() != 2 or rows.shape[1] == 0:
            raise ValueError(f"rows must have shape (N, d), got {tuple(rows.shape)}")
        if len(rows) < self.k:
            raise ValueError(f"k={self.k} clusters need at least as many rows, got {len(rows)}: lower k")
        rows = where_precise(rows.detach())
        if not bool(torch.stack(torch.aminmax(rows)).isfinite().all()):
            raise checks.NonFiniteError("rows holds NaN or inf: look for a diverged model before clustering")
        step = whole("step", step, at_least=0)
        backend = self.backend
        if backend == "auto":
            backend = "faiss" if rows.device.type == "cpu" and kmeans.faiss_is_installed() else "torch"
        with exact_products(rows.device):
            units = kmeans.unit_rows(rows)
            found = [
                kmeans.cluster(units, self.k, self.iterations, (self.seed, step, repeat), backend)
                for repeat in range(self.repeats)
            ]
        self.assignments = torch.stack(found).to(self.assignments)
        self.fitted_at, self._cluster_lists = step, None
        return self

    def refresh(self, rows: TensorLike, step: int, every: int) -> bool:
        """Cluster the rows if the last `fit` was ``every`` steps ago or never; return True if it did."""
        every = whole("every", every)
        due = self.fitted_at is None or step - self.fitted_at >= every
        if due:
            self.fit(rows, step)
        return due

    def same(self, idx: TensorLike, among: TensorLike | None = None) -> Tensor:
        """Mask of the close neighbors of these rows, (B, N) bool; a row is one of its own.

        idx: (B,) indices of rows · among: (M,) or (B, M) indices of the rows to compare with (default: all N), such as
        those drawn as negatives; then the mask is (B, M). If an index on an accelerator is out of range, all is False
        """
        idx, validity = self._indices("idx", idx, (1,))
        others = None
        if among is not None:
            others, others_validity = self._indices("among", among, (1, 2))
            validity = checks.jointly(validity, others_validity)
        if others is not None and others.dim() == 2 and len(others) != len(idx):
            raise ValueError(f"among must have shape (M,) or ({len(idx)}, M), got {tuple(others.shape)}")
        mask: Tensor | None = None
        for clustering in self.assignments:
            compared = clustering if others is None else clustering[others]  # (N,), (M,) or (B, M)
            equal = clustering[idx, None] == compared  # (B, N) or (B, M)
            mask = equal if mask is None else mask.logical_or_(equal)
        assert mask is not None
        return mask if validity is None else mask & ~validity.isnan()

    def members(self, idx: TensorLike) -> Tensor:
        """The close neighbors of these rows as lists, in O(B·L): (B, L) indices, ascending, padded with −1.

        idx: (B,) indices of rows · L: length of the longest of these lists. If an index on an accelerator is out of
        range, all lists are empty
        """
        idx, validity = self._indices("idx", idx, (1,))
        order, starts = self._rows_by_cluster()
        size = order.shape[1]
        own = self.assignments[:, idx].long()  # (repeats, B)
        first = starts.gather(1, own)
        count = starts.gather(1, own + 1) - first
        column = torch.arange(int(count.max()) if len(idx) else 0, device=order.device)
        position = (first[:, :, None] + column).clamp_(max=size - 1)  # (repeats, B, L)
        found = order.gather(1, position.flatten(1)).view_as(position)
        found.masked_fill_(column >= count[:, :, None], size)  # padding sorts last
        lists = found.transpose(0, 1).flatten(1)  # (B, repeats·L)
        if self.repeats > 1:
            lists = lists.sort(dim=1).values
            lists[:, 1:].masked_fill_(lists[:, 1:] == lists[:, :-1], size)  # in several of the clusters
            lists = lists.sort(dim=1).values
            lists = lists[:, : int((lists < size).sum(dim=1).max()) if len(idx) else 0]
        unused = lists == size
        return lists.masked_fill(unused if validity is None else unused | validity.isnan(), -1)

    def get_extra_state(self) -> Tensor:
        """The number of clusters, and the step of the last fit (−1: none)."""
        return torch.tensor([self.k, -1 if self.fitted_at is None else self.fitted_at])

    def set_extra_state(self, state: Tensor) -> None:
        """Load a state from `get_extra_state`."""
        k, step = (int(number) for number in state)
        if k != self.k:
            raise ValueError(f"the state holds clusterings with k={k}, but k={self.k} here: build Clusters(k={k})")
        self.fitted_at = None if step < 0 else step

    def extra_repr(self) -> str:
        return f"k={self.k}, repeats={self.repeats}, rows={self.assignments.shape[1]}, backend={self.backend!r}"

    def _rows_by_cluster(self) -> tuple[Tensor, Tensor]:
        """Rows in order of cluster, (repeats, N), and the position where each cluster starts, (repeats, k + 1)."""
        if self._cluster_lists is None or self._cluster_lists[0].device != self.assignments.device:
            ordered, order = self.assignments.sort(dim=1, stable=True)
            edges = torch.arange(self.k + 1, device=order.device, dtype=ordered.dtype)
            self._cluster_lists = order, torch.searchsorted(ordered, edges.expand(self.repeats, -1).contiguous())
        return self._cluster_lists

    def _indices(self, name: str, idx: TensorLike, dimensions: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Indices on the device of the clusters, safe to use, and their validity; see `checks.in_range`."""
        if self.fitted_at is None:
            raise ValueError("there are no clusters yet: call fit(bank.rows) first")
        idx = as_tensor(name, idx)
        idx = checks.integers(name, idx, tuple(idx.shape) if idx.dim() in dimensions else (-1,), "indices of rows")
        size, device = self.assignments.shape[1], self.assignments.device
        if not checks.on_accelerator(idx.device):
            checks.in_range(name, idx, size)
            return idx.to(device), None
        return checks.in_range(name, idx.to(device), size)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        stored = state_dict.get(f"{prefix}assignments")
        if stored is not None and len(stored) == self.repeats:
            # The number of rows is set by `fit`, which has not run yet when a run is resumed.
            self.assignments = self.assignments.new_empty(stored.shape)
        self._cluster_lists = None
        super()._load_from_state_dict(state_dict, prefix, *rest)
