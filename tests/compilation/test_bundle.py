"""Bundles of compiled kernels: what is read is what was written, verified, for these versions."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.compilation import bundle as _bundle
from dsv4.compilation import sealed_file
from dsv4.compilation.bundle import BundleError, Compiled
from dsv4.compilation.versions import Versions
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.driver import Image

ARCH = "sm_90a"
VERSIONS = Versions("1", "2", "3", "4")
IMAGES = [Compiled(bytes([i]) * 32, f"kernel {i}", b"code " * (i + 1)) for i in range(3)]
compiled = st.builds(Compiled, st.binary(min_size=32, max_size=32), st.text(), st.binary())


@pytest.fixture(autouse=True)
def no_bundle(monkeypatch, tmp_path):
    """Versions of this machine, and no kernels on disk."""
    monkeypatch.delenv(_bundle.VARIABLE, raising=False)
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path / "kernels"))
    _bundle.active.cache_clear()
    _bundle._say.cache_clear()
    yield
    _bundle.active.cache_clear()


def images_of(content):
    result = _bundle.decode(content)
    for image in IMAGES:
        assert result.image(image.key) == image.content, "a wrong image was given"


def written(path, versions=None, images=IMAGES, arch=ARCH):
    _bundle.write(path, _bundle.encode(arch, images, versions or Versions.current()))
    return path


@given(st.lists(compiled, max_size=5, unique_by=lambda image: image.key), st.randoms())
def test_what_is_written_is_read_in_any_order(images, random):
    content = _bundle.encode(ARCH, images, VERSIONS)
    result = _bundle.decode(content)
    assert (result.arch, result.versions) == (ARCH, VERSIONS)
    assert {key: result.image(key) for key in result.entries} == {i.key: i.content for i in images}
    assert result.image(b"another key") is None
    random.shuffle(images)
    assert _bundle.encode(ARCH, [*images, *images[:1]], VERSIONS) == content


@given(st.data())
def test_a_changed_byte_is_found(data):
    content = bytearray(_bundle.encode(ARCH, IMAGES, VERSIONS))
    end = len(content) - 1
    position = data.draw(st.one_of(st.integers(0, end), st.integers(end - 29, end)))
    content[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BundleError):
        images_of(bytes(content))


@given(st.integers(0, 2000), st.binary(max_size=9))
@example(0, b"")
def test_half_a_bundle_and_a_longer_one(length, more):
    content = _bundle.encode(ARCH, IMAGES, VERSIONS)
    changed = content[:length] + more
    if changed != content:
        with pytest.raises(BundleError):
            _bundle.decode(changed)


@given(st.binary(min_size=8, max_size=8), st.binary(min_size=32, max_size=32), st.binary())
def test_sealed_files(magic, key, content):
    file = sealed_file.encode(magic, key, content)
    assert sealed_file.decode(magic, key, file) == content
    other = bytes(32) if key != bytes(32) else bytes([1]) * 32
    for wrong in (file[:-1], file + b"0", b"", file[:50] + bytes([file[50] ^ 1]) + file[51:]):
        with pytest.raises(sealed_file.DamagedError):
            sealed_file.decode(magic, key, wrong)
    with pytest.raises(sealed_file.DamagedError, match="made from something else"):
        sealed_file.decode(magic, other, file)


class TestUse:
    def test_an_image_comes_from_the_bundle(self, tmp_path):
        _bundle.use(written(tmp_path / "b"))
        assert _bundle.image(ARCH, IMAGES[1].key) == IMAGES[1].content
        assert _bundle.image("sm_100a", IMAGES[1].key) is None

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Versions)])
    def test_of_other_versions_it_is_not_used(self, field, tmp_path, monkeypatch, caplog):
        other = dataclasses.replace(Versions.current(), **{field: "other"})
        path = written(tmp_path / "b", other)
        with pytest.raises(BundleError, match=f"made for something else: {field} is other, here"):
            _bundle.use(path)
        monkeypatch.setenv(_bundle.VARIABLE, str(path))
        with caplog.at_level(logging.WARNING):
            assert [_bundle.image(ARCH, image.key) for image in IMAGES] == [None] * 3
        assert [r.message.startswith("kernels are compiled, because") for r in caplog.records] == [
            True
        ]
        assert f"{field} is other" in caplog.text

    def test_of_another_architecture_neither(self, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv(_bundle.VARIABLE, str(written(tmp_path / "b", arch="sm_100a")))
        assert _bundle.image(ARCH, IMAGES[0].key) is None
        assert "arch is sm_100a, here sm_90a" in caplog.text

    def test_a_missing_file_and_one_that_others_can_write(self, tmp_path, caplog, monkeypatch):
        with pytest.raises(BundleError, match=r"b cannot be used: No such file"):
            _bundle.use(tmp_path / "b")
        path = written(tmp_path / "b")
        path.chmod(0o666)
        with pytest.raises(BundleError, match="can be written by every user"):
            _bundle.use(path)
        monkeypatch.setenv(_bundle.VARIABLE, str(path))
        assert _bundle.image(ARCH, IMAGES[0].key) is None
        assert "can be written by every user" in caplog.text

    def test_the_environment_names_it(self, tmp_path, monkeypatch):
        monkeypatch.setenv(_bundle.VARIABLE, str(written(tmp_path / "b")))
        assert _bundle.image(ARCH, IMAGES[0].key) == IMAGES[0].content

    def test_a_package_has_it_and_is_not_imported(self, tmp_path, monkeypatch):
        package = tmp_path / _bundle.PACKAGE
        package.mkdir(mode=0o755)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        written(package / f"{ARCH}{_bundle.ENDING}")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert _bundle.image(ARCH, IMAGES[2].key) == IMAGES[2].content
        assert _bundle.installed("sm_103a") is None
        assert _bundle.PACKAGE not in sys.modules

    def test_a_damaged_image_is_compiled(self, tmp_path, caplog):
        path = written(tmp_path / "b")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        _bundle.use(path)
        assert _bundle.image(ARCH, IMAGES[0].key) == IMAGES[0].content
        assert _bundle.image(ARCH, IMAGES[2].key) is None
        assert "the SHA-256 of kernel 2 differs" in caplog.text


@dataclasses.dataclass(frozen=True)
class Plan:
    number: int = 1
    threads: int = 32
    blocks: int = 1
    shared_bytes: int = 0


def test_cutedsl_kernels_come_from_it(tmp_path, monkeypatch):
    from dsv4.cute.runtime import cubin_file

    image, key = Image(b"code", "name", 32, 1, 0), cubin_cache.key(Plan(), ARCH)
    _bundle.use(
        written(tmp_path / "b", images=[Compiled(key, "name", cubin_file.encode(image, key))])
    )
    monkeypatch.setattr(cubin_cache, "compile_image", lambda plan, arch: pytest.fail("compiled"))
    assert cubin_cache.image(Plan(), ARCH) == image
    assert cubin_cache.stored(Plan(2), ARCH) is None


def test_versions_name_the_sources():
    from dsv4.compilation import versions as _versions

    assert len(_versions.sources()) == len(hashlib.sha256().hexdigest())
    assert len({_versions.digest((name,)) for name in ("cute", "triton")}) == 2
    assert Versions.current().difference(Versions.current()) is None
