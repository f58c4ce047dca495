"""Tasks in this process or on a Ray cluster: a function of a shared object and of the argument of each task."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from hardneg.extras import required
from hardneg.progress import progress

ENGINES = ("local", "ray")
_RETRIES = 8  # of a task whose worker was lost
Shared = TypeVar("Shared")
Argument = TypeVar("Argument")
Result = TypeVar("Result")


def run(
    engine: str,
    function: Callable[[Shared, Argument], Result],
    shared: Shared,
    arguments: Sequence[Argument],
    title: str,
) -> Iterator[tuple[int, Result]]:
    """The number and the result of each task, in any order. title: of the progress bar"""
    if engine == "local":
        for number in progress(range(len(arguments)), title):
            yield number, function(shared, arguments[number])
        return
    found = _on_ray(function, shared, arguments)
    for _ in progress(range(len(arguments)), title):
        yield next(found)


def has_gpus() -> bool:
    """Whether the cluster has GPUs; then each task has one."""
    return bool(_cluster().cluster_resources().get("GPU"))


def _on_ray(function: Any, shared: Any, arguments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """A task whose worker or node is lost runs again."""
    ray, gpus = _cluster(), int(has_gpus())
    task = ray.remote(max_retries=_RETRIES, num_gpus=gpus)(function)
    kept, numbers = ray.put(shared), iter(range(len(arguments)))
    # Two for each worker: results wait in the memory of the cluster until they are fetched.
    most = max(2, 2 * int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1)))
    waiting = {task.remote(kept, arguments[number]): number for number in islice(numbers, most)}
    while waiting:
        done, _ = ray.wait([*waiting], num_returns=1)
        number, result = waiting.pop(done[0]), ray.get(done[0])
        waiting |= {task.remote(kept, arguments[another]): another for another in islice(numbers, 1)}
        yield number, result


def _cluster() -> Any:
    ray = required("ray", "cluster")
    if not ray.is_initialized():
        raise ValueError('engine="ray" needs a cluster: call ray.init(address="auto") first, or use engine="local"')
    return ray
