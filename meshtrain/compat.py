"""Holds all that differs between JAX 0.10, 0.11 and 0.12 or is private to JAX."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
from jax.extend.core import JaxprEqn

Tree = Any


def varying(x: jax.Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """The manual mesh axes over which the value of `x` differs between devices (its VMA type)."""
    kind: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else kind.vma)


def struct_like(
    shape: tuple[int, ...], dtype: Any, x: jax.Array
) -> jax.ShapeDtypeStruct:
    """A shape and dtype whose value varies over the same manual mesh axes as that of `x`."""
    return jax.ShapeDtypeStruct(
        shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type
    )


def vary(tree: Tree, axes: Iterable[str]) -> Tree:
    """`tree` with every leaf's type varying over `axes`; no data moves.

    The transpose is a psum over the axes that were added.
    """
    # A set's order differs between processes, and so would their programs.
    wanted = sorted(set(axes))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in wanted if a not in varying(x))
        if missing:
            return jax.lax.pcast(x, missing, to="varying")
        return x

    return jax.tree.map(cast, tree)


def residuals(vjp: Callable) -> list[Any]:
    """Returns the arrays that a `jax.vjp` function keeps of the forward pass, less the function's own arguments."""
    return vjp.opaque_residuals  # type: ignore[attr-defined]


def with_residuals(vjp: Callable, kept: list[Any]) -> Callable:
    """Returns the same vjp function over other residuals of the same shapes.

    The forward pass that `vjp` itself traced is then dead code.
    """
    other = copy.copy(vjp)
    other.opaque_residuals = kept  # type: ignore[attr-defined]
    return other


def bind(equation: JaxprEqn, values: list[Any]) -> list[Any]:
    """One equation of a jaxpr on other values, in the named scopes that it was made in."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with equation.ctx.manager, scopes_of(equation):
        outs = equation.primitive.bind(*functions, *values, **params)
    if equation.primitive.multiple_results:
        return list(outs)
    return [outs]


def scopes_of(equation: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """The named scopes and transformations that an equation stands in, for what is traced within."""
    names = str(equation.source_info.name_stack)
    if names:
        return jax.named_scope(names)
    return contextlib.nullcontext()


@contextlib.contextmanager
def lines_as_they_are() -> Iterator[None]:
    """Compiles with the lines of today's source: else JAX may reuse a cached program with the old lines."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


def joined_processes() -> int:
    """The processes that jax.distributed was told of, 1 without it; unlike jax.process_count it starts no devices."""
    from jax._src.distributed import global_state

    return global_state.num_processes if jax.distributed.is_initialized() else 1


def keep_compiled() -> None:
    """Has every process write what it compiles into the persistent compilation cache where each needs an entry of its
    own.

    JAX lets the first process write for all. On CPU that is not enough, since the key of a program holds the process it
    is for.
    """
    from jax._src import compiler

    if jax.default_backend() == "cpu":
        # All that this module asks of it: who writes, and (no client) whether programs are sent to other processes.
        alone = SimpleNamespace(global_state=SimpleNamespace(process_id=0, client=None))
        compiler.distributed = alone  # type: ignore[assignment]


def cache_compiled(directory: Path, most: int) -> None:
    """Has the next process read from `directory` what this one compiles, unless another cache is named.

    Programs beyond `most` bytes are removed, those written first. A directory that cannot be used is left alone.
    """
    name = "jax_compilation_cache_dir"
    if getattr(jax.config, name) is not None:
        return
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        programs = sorted((path.stat().st_mtime, path) for path in directory.iterdir())
        size = sum(path.stat().st_size for _, path in programs)
        for _, path in programs:
            if size <= most:
                break
            size -= path.stat().st_size
            path.unlink()
        jax.config.update(name, str(directory))


def compile_collectives_anew() -> None:
    """Keeps programs of several CPU devices out of the persistent compilation cache.

    XLA orders all collectives of a CPU program by one communicator. A program read back has one for each loop and
    branch instead (xla/backends/cpu/runtime/thunk_proto_serdes.cc), so that two collectives may meet at once: ranks
    then exchange the wrong arrays, or wait forever.
    """
    from jax._src import compiler

    cached = compiler.compile_or_get_cached
    if cached.__module__ == __name__:
        return

    def compile_program(
        backend: Any,
        module: Any,
        devices: Any,
        options: Any,
        callbacks: Any,
        placed: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        if backend.platform == "cpu" and devices.size > 1:
            return compiler.backend_compile_and_load(
                backend, module, placed, options, callbacks
            )
        return cached(
            backend, module, devices, options, callbacks, placed, *more, **named
        )

    compiler.compile_or_get_cached = compile_program  # type: ignore[assignment]


def wait_for_processes(name: str, seconds: float) -> None:
    """Waits for all processes of the run, without their devices: collectives of a CPU bear 30 s of waiting and no
    more.
    """
    from jax._src.distributed import global_state

    if global_state.client is not None:
        global_state.client.wait_at_barrier(name, timeout_in_ms=int(1000 * seconds))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Turns off the types of manual mesh axes, for kernels that declare none.

    The caller types what comes out.
    """
    from jax._src import config

    with config._check_vma(False):
        yield
