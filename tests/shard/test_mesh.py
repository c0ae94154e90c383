import numpy as np
import pytest

from autopar.passes.mesh import Mesh, MeshError, balanced, nested, start


@pytest.mark.parametrize("text", ["", "tp=2", "pp=2,tp=2", "tp=3,dp=2", "dp=1,cp=4"])
def test_text_round_trips(text):
    assert str(Mesh.parse(text)) == text
    assert Mesh.parse(str(Mesh.parse(text))) == Mesh.parse(text)


def test_blanks_are_allowed():
    for text in (" pp = 2 , tp=4 ", "pp=2 tp=4", "pp=2\ttp= 4"):
        assert Mesh.parse(text) == Mesh((("pp", 2), ("tp", 4)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pt=2", "unknown axis 'pt'\n  fix  the axes are pp, dp, fsdp, cp, ep, tp"),
        ("tp=2,tp=4", "axis 'tp' is there twice in mesh 'tp=2,tp=4'\n  fix  write it "),
        ("pp=2,tp=0", "axis 'tp' has size 0\n  fix  sizes are at least 1"),
        ("tp=-2", "axis 'tp' has size -2"),
        ("tp=two", "size 'two' of axis 'tp' in mesh 'tp=two' is not a whole number"),
        ("tp=", "size '' of axis 'tp'"),
        ("tp=1.5", "size '1.5' of axis 'tp'"),
        ("tp", "'tp' in mesh 'tp' is not an axis\n  fix  write name=size"),
        ("=2", "'=2' in mesh '=2' is not an axis"),
        ("pp=2,,tp=2", "'' in mesh 'pp=2,,tp=2' is not an axis"),
        ("pp=2,tp=2,", "'' in mesh"),
        ("time=4", "'time' is the axis of microbatches and no axis of the mesh"),
    ],
)
def test_a_bad_mesh_names_the_bad_piece_and_the_fix(text, message):
    with pytest.raises(MeshError) as error:
        Mesh.parse(text)
    assert message in str(error.value)


def test_the_last_axis_is_the_fastest():
    mesh = Mesh.parse("pp=2,dp=3,tp=2")
    assert mesh.size == 12
    assert [mesh.coords(rank)["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert list(mesh.coords(9).items()) == [("pp", 1), ("dp", 1), ("tp", 1)]
    assert [mesh.rank(mesh.coords(rank)) for rank in range(12)] == list(range(12))


def test_an_axis_that_is_not_there_has_size_one():
    mesh = Mesh.parse("pp=2,tp=3")
    assert [mesh.axis_size(name) for name in ("pp", "dp", "tp")] == [2, 1, 3]
    assert mesh.group(4, ("dp",)) == (4,)


@pytest.mark.parametrize("text", ["tp=2", "pp=2,dp=2,tp=2", "dp=3,tp=2,pp=2"])
def test_groups_are_slices_of_the_row_major_grid(text):
    mesh = Mesh.parse(text)
    names = [name for name, _ in mesh.axes]
    grid = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    for axes in [(), ("tp",), ("pp",), ("tp", "dp"), ("dp", "tp"), ("pp", "dp", "tp")]:
        for rank in range(mesh.size):
            at = mesh.coords(rank)
            want = grid[tuple(slice(None) if n in axes else at[n] for n in names)]
            assert mesh.group(rank, axes) == tuple(want.ravel().tolist())
        each = [mesh.group(rank, axes) for rank in range(mesh.size)]
        assert list(mesh.groups(axes)) == sorted(set(each))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda mesh: mesh.coords(4), "mesh 'pp=2,tp=2' has no rank 4"),
        (lambda mesh: mesh.coords(-1), "no rank -1"),
        (lambda mesh: mesh.rank({"pp": 0}), "give one number for each of its axes"),
        (lambda mesh: mesh.rank({"pp": 0, "tp": 2}), "tp goes from 0 to 1"),
        (lambda mesh: mesh.axis_size("xp"), "unknown axis 'xp'"),
        (lambda mesh: mesh.group(0, ("time",)), "no axis of the mesh"),
    ],
)
def test_questions_without_an_answer(ask, message):
    with pytest.raises(MeshError) as error:
        ask(Mesh.parse("pp=2,tp=2"))
    assert message in str(error.value)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 50257])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_balanced_is_array_split(n, parts):
    pieces = np.array_split(np.arange(n), parts)
    assert balanced(n, parts) == tuple(len(piece) for piece in pieces)
    for i, piece in enumerate(pieces):
        assert start(n, parts, i) == sum(len(p) for p in pieces[:i])
        assert len(piece) == 0 or start(n, parts, i) == piece[0]


def test_parts_of_parts() -> None:
    assert nested(17, (2, 3)) == (3, 3, 3, 3, 3, 2)
    assert nested(17, ()) == (17,)
