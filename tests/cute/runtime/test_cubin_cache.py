"""The cache of compiled kernels: what is damaged or another user's never reaches the driver."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.cute.runtime import cubin_cache, cubin_file, trusted
from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime.driver import Image, Kernel

STRANGER = 54321
ME = os.geteuid()


@dataclass(frozen=True)
class Plan:
    """Stands for a configuration of a kernel."""

    number: int = 0
    kernel: str = "module:class"
    threads: int = 128
    ctas: int = 2
    shared_bytes: int = 4096


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's folder, which does not exist yet."""
    folder = tmp_path / "cache" / "kernels"
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """The plans that were compiled; the "compiler" makes other bytes each time."""
    made = []

    def compile_image(plan, arch):
        made.append(plan)
        code = b"code %d of plan %d" % (len(made), plan.number)
        return Image(code, f"entry_{plan.number}", plan.threads, plan.ctas, plan.shared_bytes)

    monkeypatch.setattr(cubin_cache, "compile_image", compile_image)
    return made


@pytest.fixture
def loaded(monkeypatch):
    """The bytes that the driver was given."""
    given_bytes = []

    class Driver:
        def __getattr__(self, name):
            return lambda *arguments: 0

        def cuLibraryLoadData(self, library, code, *rest):  # noqa: N802, the driver's
            given_bytes.append(code)
            return 0

    monkeypatch.setattr(cuda_driver, "_driver", lambda: Driver())
    return given_bytes


@pytest.fixture
def said(caplog):
    """The warnings of the cache, each text once per process: forgotten before a test."""
    cubin_cache._say.cache_clear()
    caplog.set_level(logging.WARNING, logger=cubin_cache.__name__)

    class Said(list):
        def __iter__(self):
            return iter([record.getMessage() for record in caplog.records])

        def __len__(self):
            return len(caplog.records)

    return Said()


def pretend(monkeypatch, path, uid=None, mode=None, gid=None):
    """Let a file or folder seem to be another's, or writable by others, for any user."""
    inode, device = os.lstat(path).st_ino, os.lstat(path).st_dev

    def changed(real):
        def status(target, **options):
            result = real(target, **options)
            if (result.st_ino, result.st_dev) != (inode, device):
                return result
            values = list(result[:10])
            values[stat.ST_UID] = result.st_uid if uid is None else uid
            values[stat.ST_GID] = result.st_gid if gid is None else gid
            if mode is not None:
                values[stat.ST_MODE] = stat.S_IFMT(result.st_mode) | mode
            return os.stat_result(values)

        return status

    monkeypatch.setattr(os, "lstat", changed(os.lstat))
    monkeypatch.setattr(os, "fstat", changed(os.fstat))


def fetch(plan=None, arch="sm_90a"):
    return cubin_cache.image(plan or Plan(), arch)


def only_file(folder):
    (file,) = folder.iterdir()
    return file


class TestDamage:
    @given(data=st.data())
    @example(data=None)
    def test_the_driver_gets_what_was_compiled(
        self, data, tmp_path_factory, compiled, loaded, said, monkeypatch
    ):
        folder = tmp_path_factory.mktemp("kernels")
        monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(folder))
        compiled.clear(), loaded.clear()
        first = fetch()
        file, content = only_file(folder), only_file(folder).read_bytes()
        damaged = bytearray(content)
        if data is None or data.draw(st.booleans()):
            del damaged[data.draw(st.integers(0, len(content) - 1)) if data else 0 :]
        else:
            damaged[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        file.write_bytes(damaged)
        Kernel(fetch())
        assert loaded == [b"code 2 of plan 0"]
        assert fetch() == Image(b"code 2 of plan 0", first.name, 128, 2, 4096)
        assert len(compiled) == 2, "the damaged file was replaced by a good one"
        assert any(f"{file} is damaged" in text for text in said)

    def test_a_file_is_read_once(self, folder, compiled, loaded, monkeypatch):
        """The driver gets the bytes that were verified, whatever the file holds by then."""
        fetch()
        decode = cubin_file.decode

        def exchange(content, key):
            only_file(folder).write_bytes(b"exchanged after it was read")
            return decode(content, key)

        monkeypatch.setattr(cubin_file, "decode", exchange)
        Kernel(fetch())
        assert (loaded, len(compiled)) == ([b"code 1 of plan 0"], 1)

    def test_a_swapped_file_is_not_the_other_kernel(self, folder, compiled, said):
        fetch(Plan(1))
        first = only_file(folder)
        fetch(Plan(2))
        (second,) = set(folder.iterdir()) - {first}
        os.replace(second, first)
        assert fetch(Plan(1)).name == "entry_1"
        assert "it is another kernel" in next(iter(said))


def model_of_trust(status, user, has_acl):
    """Return whether only root and the user can change a file or exchange a folder's entries."""
    writers = {status.st_uid} - {0, user.uid}
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & 0o1000
    if status.st_mode & 0o002 and not sticky:
        writers.add("anyone")
    if status.st_mode & 0o020 and not sticky and (status.st_gid != user.private_group or has_acl):
        writers.add("the group")
    return not writers


class TestTrust:
    @given(
        uid=st.sampled_from([0, 1000, 1001, 65534]),
        gid=st.sampled_from([0, 1000, 100]),
        user=st.sampled_from([(0, None), (1000, 1000), (1000, None), (1001, 1001)]),
        mode=st.integers(0, 0o7777),
        kind=st.sampled_from([stat.S_IFREG, stat.S_IFDIR]),
        has_acl=st.booleans(),
    )
    @example(1000, 100, (1001, None), 0o600, stat.S_IFREG, False)
    @example(1000, 1000, (1000, 1000), 0o775, stat.S_IFDIR, False)
    @example(1000, 1000, (1000, 1000), 0o775, stat.S_IFDIR, True)
    @example(0, 0, (1000, 1000), 0o1777, stat.S_IFDIR, False)
    @example(0, 0, (1000, 1000), 0o1777, stat.S_IFREG, False)
    @example(0, 0, (1000, 1000), 0o777, stat.S_IFDIR, False)
    def test_reasons(self, uid, gid, user, mode, kind, has_acl):
        status = os.stat_result((kind | mode, 1, 1, 1, uid, gid, 1, 0, 0, 0))
        who = trusted.User(*user)
        reason = trusted.others_reason(status, who, has_acl=has_acl)
        assert (reason is None) == model_of_trust(status, who, has_acl)

    def test_temporary_folders_are_trusted_and_their_parents_named(self, tmp_path, monkeypatch):
        trusted.check_folder(str(tmp_path))
        trusted.check_folder("/tmp")
        pretend(monkeypatch, tmp_path.parent, uid=STRANGER)
        with pytest.raises(trusted.UntrustedError, match=f"{tmp_path.parent} belongs to user 543"):
            trusted.check_folder(str(tmp_path))

    def test_links_are_followed_for_folders(self, tmp_path):
        real, link = tmp_path / "real" / "inner", tmp_path / "link"
        real.mkdir(parents=True)
        link.symlink_to("./real/../real")
        (tmp_path / "absolute").symlink_to(real)
        for folder in ("link/inner", "absolute", "link/../link/inner/."):
            trusted.check_folder(f"{tmp_path}/{folder}")
        with pytest.raises(FileNotFoundError):
            trusted.check_folder(f"{tmp_path}/link/missing")

    def test_what_a_link_leads_to_is_checked(self, tmp_path, monkeypatch):
        (tmp_path / "real" / "inner").mkdir(parents=True)
        (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
        pretend(monkeypatch, tmp_path / "real", mode=0o777)
        with pytest.raises(trusted.UntrustedError, match=r"/real can be written by every user"):
            trusted.check_folder(str(tmp_path / "link"))

    def test_a_link_of_another_user_is_refused(self, tmp_path, monkeypatch):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        pretend(monkeypatch, tmp_path / "link", uid=STRANGER)
        with pytest.raises(trusted.UntrustedError, match="is a symbolic link of user 54321"):
            trusted.check_folder(str(tmp_path / "link"))

    def test_links_without_end_are_refused(self, tmp_path):
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        with pytest.raises(trusted.UntrustedError, match="more than 40 symbolic links"):
            trusted.check_folder(str(tmp_path / "a"))

    def test_a_private_group_has_one_member(self, monkeypatch):
        import grp
        import pwd

        def group(name, gid, members):
            trusted._user.cache_clear()
            account = pwd.struct_passwd(("me", "x", 1000, gid, "", "/", "/bin/sh"))
            monkeypatch.setattr(pwd, "getpwuid", lambda uid: account)
            monkeypatch.setattr(
                grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members))
            )
            result = trusted._user(1000).private_group
            trusted._user.cache_clear()
            return result

        assert group("me", 1000, []) == group("me", 1000, ["me"]) == 1000
        assert group("me", 1000, ["other"]) is None
        assert group("staff", 1000, []) is None
        assert group("me", 0, []) is None

    def test_without_owners_nothing_is_trusted(self, folder, compiled, said, monkeypatch):
        monkeypatch.delattr(os, "geteuid")
        assert fetch().name == "entry_0"
        assert not folder.exists()
        assert "this system does not tell who can change a file" in next(iter(said))


class TestOtherUsers:
    def test_planted_files_are_refused(self, folder, compiled, loaded, said, monkeypatch):
        """Even a file with the right key, lengths and hash, if another user owns it."""
        for number in range(3):
            fetch(Plan(number))
        planted = {file: file.read_bytes() for file in folder.iterdir()}
        for file in planted:
            pretend(monkeypatch, file, uid=STRANGER)
        for number in range(3):
            Kernel(fetch(Plan(number)))
        assert loaded == [b"code %d of plan %d" % (4 + n, n) for n in range(3)]
        assert {file: file.read_bytes() for file in folder.iterdir()} == planted, "not touched"
        (text,) = said
        assert f"not kept in {folder}: a file there belongs to user {STRANGER}" in text

    @pytest.mark.parametrize("mode", [0o602, 0o666, 0o777, 0o620])
    def test_a_file_that_others_can_write_is_refused_and_replaced(
        self, mode, folder, compiled, said, monkeypatch
    ):
        fetch()
        pretend(monkeypatch, only_file(folder), mode=mode, gid=STRANGER)
        assert fetch().cubin == b"code 2 of plan 0"
        assert "can be written by" in next(iter(said))
        assert fetch().cubin == b"code 2 of plan 0", "the new file is ours alone"

    @pytest.mark.parametrize(
        "change", [{"uid": STRANGER}, {"mode": 0o757}, {"mode": 0o775, "gid": STRANGER}]
    )
    @pytest.mark.parametrize("above", [False, True])
    def test_a_folder_of_others_is_neither_read_nor_written(
        self, change, above, folder, compiled, said, monkeypatch
    ):
        fetch()
        before = only_file(folder).read_bytes()
        pretend(monkeypatch, folder.parent if above else folder, **change)
        for number in range(2):
            fetch(Plan(number))
        assert len(compiled) == 3
        assert only_file(folder).read_bytes() == before
        assert len(said) == 1

    def test_nothing_is_made_in_a_folder_of_others(self, folder, compiled, said, monkeypatch):
        folder.parent.mkdir()
        pretend(monkeypatch, folder.parent, mode=0o777)
        assert fetch().name == "entry_0"
        assert not folder.exists()

    def test_files_that_cannot_be_read(self, folder, compiled, said, monkeypatch):
        """A shared folder with another user's files of mode 0600."""
        fetch(Plan(1)), fetch(Plan(2))
        for file in folder.iterdir():
            pretend(monkeypatch, file, uid=STRANGER, mode=0o600)
        real = os.open

        def refuse(path, flags, *rest):
            if str(path).endswith(".cubin"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(path, flags, *rest)

        monkeypatch.setattr(os, "open", refuse)
        assert [fetch(Plan(n)).name for n in (1, 2)] == ["entry_1", "entry_2"]
        (text,) = said
        assert f"belongs to user {STRANGER}" in text

    @pytest.mark.skipif(ME != 0, reason="gives files away")
    def test_real_owners(self, folder, compiled, said):
        fetch()
        os.chown(only_file(folder), STRANGER, STRANGER)
        assert fetch().cubin == b"code 2 of plan 0"
        os.chown(only_file(folder), 0, 0)
        assert fetch().cubin == b"code 1 of plan 0"
        os.chown(folder, STRANGER, STRANGER)
        assert fetch().cubin == b"code 3 of plan 0"
        assert len(said) == 2

    @pytest.mark.skipif(ME != 0, reason="the files are root's")
    def test_files_of_root_serve_everybody(self, folder, compiled, said, monkeypatch):
        """Kernels are in folders that the user cannot write, like an installed package's."""
        fetch()
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        assert fetch().cubin == b"code 1 of plan 0"
        assert len(said) == 0

    @pytest.mark.parametrize("kind", ["link", "folder", "fifo", "large"])
    def test_what_is_no_regular_file(self, kind, folder, compiled, said, tmp_path, monkeypatch):
        fetch()
        file, aside = only_file(folder), tmp_path / "aside"
        os.replace(file, aside)
        if kind == "link":
            file.symlink_to(aside)
        elif kind == "folder":
            file.mkdir()
        elif kind == "fifo":
            os.mkfifo(file)
        else:
            monkeypatch.setattr(trusted, "MOST_BYTES", 10)
            os.replace(aside, file)
        assert fetch().cubin == b"code 2 of plan 0"
        assert [entry.name for entry in folder.iterdir()] == [file.name]
        assert len(said) == 1


class TestFolders:
    def test_files_are_readable_by_all_and_written_by_one(self, folder, compiled):
        before = os.umask(0)
        try:
            fetch()
        finally:
            os.umask(before)
        assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o644
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o755
        assert fetch().cubin == b"code 1 of plan 0"
        assert len(compiled) == 1

    @pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/kernels", "/proc/dsv4/kernels"])
    def test_places_that_can_be_no_folder(self, folder, compiled, said, monkeypatch):
        monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, folder)
        for number in range(3):
            assert fetch(Plan(number)).name == f"entry_{number}"
        assert len(said) == 1
        assert folder in next(iter(said))

    def test_a_path_that_is_a_file(self, tmp_path, compiled, said, monkeypatch):
        (tmp_path / "file").write_text("mine")
        for folder in ("file", "file/inner"):
            monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path / folder))
            assert fetch().name == "entry_0"
        assert (tmp_path / "file").read_text() == "mine"
        assert [text.split(": ")[1].split(". ")[0] for text in said] == [
            f"{tmp_path / 'file'} is not a folder"
        ] * 2

    def test_no_home(self, compiled, said, monkeypatch):
        import pwd

        def missing(uid):
            raise KeyError(uid)

        monkeypatch.delenv(cubin_cache.CACHE_VARIABLE, raising=False)
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", missing)
        for number in range(2):
            assert fetch(Plan(number)).name == f"entry_{number}"
        (text,) = said
        assert "there is no home directory" in text
        assert cubin_cache.CACHE_VARIABLE in text

    def test_the_folder_is_below_home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv(cubin_cache.CACHE_VARIABLE, raising=False)
        assert cubin_cache.folder() == tmp_path / ".cache" / "dsv4" / "kernels"
        monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, "~/own")
        assert cubin_cache.folder() == tmp_path / "own"
        monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, "relative")
        assert cubin_cache.folder().is_absolute()

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
    @pytest.mark.parametrize("call", ["mkdir", "open", "write", "replace"])
    def test_a_full_or_read_only_disk(self, call, code, folder, compiled, said, monkeypatch):
        def fail(*arguments, **options):
            raise OSError(code, os.strerror(code))

        def failing_stream(handle, *rest, **options):
            stream = fdopen(handle, *rest, **options)
            if stream.writable():
                stream.close()
                stream = Full()
            return stream

        class Full:
            def __enter__(self):
                return self

            def __exit__(self, *reason):
                return None

            write = fail

        fdopen, real_open = os.fdopen, os.open

        def open_to_write(path, flags, *rest):
            return fail() if flags & os.O_CREAT else real_open(path, flags, *rest)

        patches = {"open": open_to_write, "write": failing_stream}
        with monkeypatch.context() as patch:
            name = "fdopen" if call == "write" else call
            patch.setattr(os, name, patches.get(call, fail))
            names = [fetch(Plan(number)).name for number in range(3)]
        assert names == ["entry_0", "entry_1", "entry_2"]
        assert not folder.exists() or list(folder.iterdir()) == [], "litter"
        (text,) = said
        assert os.strerror(code) in text
        fetch()
        assert len(list(folder.iterdir())) == 1

    def test_an_interrupt_leaves_nothing_behind(self, folder, compiled, monkeypatch):
        def interrupt(*names):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch()
        assert list(folder.iterdir()) == []

    def test_many_writers_and_readers(self, folder, compiled):
        result, failures = [], []

        def work():
            try:
                result.extend(fetch(Plan(n % 4)).name for n in range(40))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(result) == 320
        assert len(list(folder.iterdir())) == 4
        assert len(compiled) <= 32
