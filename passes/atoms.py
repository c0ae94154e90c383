"""Union-find over dims, where a dim may also turn out to be a product of dims."""

from __future__ import annotations

from collections.abc import Iterable


class Atoms:
    """Knows which dims are the same, and which are products of others."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self.parent: list[int] = []
        self.parts: dict[int, tuple[int, ...]] = {}

    def fresh(self, size: int) -> list[int]:
        """A new dim; extent 1 is the empty product."""
        if size == 1:
            return []
        self.size.append(size)
        self.parent.append(len(self.parent))
        return [len(self.parent) - 1]

    def root(self, atom: int) -> int:
        """Returns the representative of an atom's class, halving the path to it."""
        while self.parent[atom] != atom:
            self.parent[atom] = self.parent[self.parent[atom]]
            atom = self.parent[atom]
        return atom

    def leaves(self, atoms: Iterable[int]) -> list[int]:
        """The product written out in dims that are not split further."""
        leaves: list[int] = []
        for atom in atoms:
            atom = self.root(atom)
            if atom in self.parts:
                leaves += self.leaves(self.parts[atom])
            else:
                leaves.append(atom)
        return leaves

    def unify(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Make two products of equal extent the same, as far as their sizes allow."""
        a, b = self.leaves(left)[::-1], self.leaves(right)[::-1]
        while a and b:
            # Splitting may have touched dims that are still waiting in the lists.
            x, y = self.root(a.pop()), self.root(b.pop())
            if x in self.parts or y in self.parts:
                a += self.leaves([x])[::-1]
                b += self.leaves([y])[::-1]
                continue
            if x == y:
                continue
            if self.size[x] == self.size[y]:
                self.parent[max(x, y)] = min(x, y)
            elif not self.size[x] or not self.size[y]:
                return  # nothing is a multiple of every extent
            elif self.size[x] % self.size[y] == 0:
                a += self._split(x, self.size[y])
                b.append(y)
            elif self.size[y] % self.size[x] == 0:
                b += self._split(y, self.size[x])
                a.append(x)
            else:
                return

    def _split(self, atom: int, outer: int) -> list[int]:
        """atom -> (outer, inner); returned innermost first, as a stack."""
        parts = (*self.fresh(outer), *self.fresh(self.size[atom] // outer))
        self.parts[atom] = parts
        return list(parts[::-1])
