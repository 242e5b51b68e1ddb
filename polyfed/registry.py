"""Classes by name: polyfed's own, the user's, those at an address, and those that other packages offer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from polyfed.addresses import load_trusted
from polyfed.errors import InputError, first_line, unknown_name

if TYPE_CHECKING:
    from polyfed.engines.base import Engine

T = TypeVar("T")


class Registry(MutableMapping[str, type[T]]):
    """All methods, or all engines.

    A class of polyfed's own may be given by its address; it is imported when it is first asked for. So settings can
    know the names of engines without importing one.
    """

    def __init__(
        self, kind: str, base: str, own: Mapping[str, type[T] | str], *, reserved: Collection[str] = ()
    ) -> None:
        self.kind = kind
        """What they are, in a word."""
        self.reserved = tuple(reserved)
        """Words that may stand in place of a name."""
        self.own = frozenset({*own, *reserved})
        """Names that are polyfed's own."""
        self._base = base
        self._classes: dict[str, type[T] | str] = dict(own)

    def __getitem__(self, name: str) -> type[T]:
        found = self._classes[name]
        if isinstance(found, str):
            found = self._classes[name] = _attribute(*found.split(":"))
        return found

    def __setitem__(self, name: str, found: type[T]) -> None:
        self._classes[name] = found

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    @property
    def choices(self) -> list[str]:
        """What polyfed itself offers, to be chosen by name."""
        return [*self.reserved, *(name for name in self._classes if name in self.own)]

    def register(self, found: type[T]) -> str:
        """Register the user's own class under its name, which is returned; a new class replaces an older one."""
        name = self._name(found)
        if name in self.own and (name in self.reserved or self[name] is not found):
            raise InputError(
                f"the {self.kind} {found.__name__} is called '{name}', like one of polyfed's own: give its class "
                "another name."
            )
        self[name] = self._complete(found)
        return name

    def is_one(self, value: object) -> bool:
        """Whether this is a class of the kind."""
        return isinstance(value, type) and issubclass(value, _attribute(*self._base.rsplit(".", 1)))

    def find(self, name: str) -> type[T]:
        """The class of that name; an unknown one raises an error that suggests the nearest.

        A name is one of polyfed's own, one that another package offers (an entry point in the group `polyfed.methods`
        or `polyfed.engines`), or an address, `package.module:Class`.
        """
        if name in self:
            return self[name]
        if ":" in name:
            self[name] = self._checked(load_trusted(name, self.kind), name)
            return self[name]
        offered = {point.name: point for point in entry_points(group=f"polyfed.{self.kind}s")}
        if name not in offered:
            raise unknown_name(self.kind, name, [*self.reserved, *self, *offered])
        try:
            found = offered[name].load()
        except Exception as error:
            raise InputError(
                f"the {self.kind} '{name}' ({offered[name].value}) can't be imported: {first_line(error)}."
            ) from error
        self[name] = self._checked(found, name)
        return self[name]

    def is_found_elsewhere(self, name: str) -> bool:
        """Whether another process would find it: it is not registered in this one alone."""
        offered = (point.name for point in entry_points(group=f"polyfed.{self.kind}s"))
        return ":" in name or name in self.own or name in offered

    def _checked(self, found: object, name: str) -> type[T]:
        if not self.is_one(found):
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise InputError(f"'{name}' is not {article} {self.kind}: it must be a subclass of {self._base}.")
        class_: type[T] = found  # type: ignore[assignment]
        self._name(class_)
        return self._complete(class_)

    def _name(self, found: type[T]) -> str:
        name = getattr(found, "name", None)
        if not isinstance(name, str) or not name:
            raise InputError(
                f"the {self.kind} {found.__name__} has no name: give its class one, such as name = 'my-{self.kind}'."
            )
        return name

    def _complete(self, found: type[T]) -> type[T]:
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise InputError(f"the {self.kind} {found.__name__} is not complete: define {', '.join(missing)} in it.")
        return found


def _attribute(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


ENGINES: Registry[Engine] = Registry(
    "engine",
    "polyfed.Engine",
    {
        "sequential": "polyfed.engines.sequential:SequentialEngine",
        "threads": "polyfed.engines.threads:ThreadsEngine",
        "vectorized": "polyfed.engines.vectorized:VectorizedEngine",
        "ray": "polyfed.engines.ray:RayEngine",
    },
    reserved=["auto"],
)
"""The engines; choices, `--help` and errors come from here."""
