"""Manifests of other software: read in each of their forms, and what they list compared with what is there.

`signatures/` holds what model-signing 1.1.1 wrote of a folder with `a.bin` (`hello`) and `sub/b c.bin` (3,000 zeros),
with a key that was thrown away: whole files by SHA-256 and by BLAKE3, parts of 1,024 bytes by BLAKE2b.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcptool
from dcptool.checkpoint.kinds import Severity
from dcptool.checks.check import Level
from dcptool.checks.side_files import patterns_of
from dcptool.errors import StorageError
from dcptool.formats.digests import WantedDigest, digests, sha256
from dcptool.formats.manifests import MAX_MANIFEST_NBYTES, is_manifest_name, read_manifests
from dcptool.formats.table import beside
from dcptool.ops.verify.judge import judge
from dcptool.ops.verify.verdict import State, VerifyOptions
from dcptool.storage import LocalStorage, locate
from tests import damage
from tests.conftest import run as cli
from tests.run_steps import kinds, whole

pytestmark = pytest.mark.torchfree
DEEP = VerifyOptions(level=Level.DEEP)
SIGNATURES = Path(__file__).parent / "signatures"
ODD = "odd\\na\nme.txt"


@pytest.fixture
def step(tmp_path):
    """A whole step, with files that nothing but a manifest can vouch for."""
    folder = whole(tmp_path / "step_1")
    (folder / "notes.txt").write_text("the learning rate was halved")
    (folder / "config").mkdir()
    (folder / "config" / "a b.yaml").write_text("lr: 1")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def digest(algorithm: str, path: Path) -> str:
    return hashlib.new(algorithm, path.read_bytes()).hexdigest()


def tool(*command: str):
    """A manifest of one of the tools, run here."""

    def write(folder: Path) -> str:
        if not shutil.which(command[0]):
            pytest.skip(f"no {command[0]} here")
        algorithm = "SHA256" if command[0] == "shasum" else command[0].removesuffix("sum").upper()
        name = f"{algorithm}SUMS"
        found = subprocess.run([*command, *names_in(folder)], cwd=folder, capture_output=True, check=True)
        (folder / name).write_bytes(found.stdout)
        return name

    write.__name__ = " ".join(command)
    return write


def megatron(folder: Path) -> str:
    """As megatron-core 0.19.2, dist_checkpointing/validation.py: the files at the top of the folder."""
    files = {name: digest("sha256", folder / name) for name in names_in(folder) if "/" not in name}
    (folder / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}, indent=2))
    return "integrity.json"


def bundle(resources: list[dict[str, str]], **serialization: object) -> str:
    """A signature as model-signing 1.1.1 writes it, _signing/signing.py; `signatures/` has real ones."""
    every = b"".join(bytes.fromhex(one["digest"]) for one in resources)
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "m", "digest": {"sha256": hashlib.sha256(every).hexdigest()}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {"serialization": serialization, "resources": resources},
    }
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    envelope = {"payload": payload, "payloadType": "application/vnd.in-toto+json", "signatures": [{"sig": "AA=="}]}
    return json.dumps({"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json", "dsseEnvelope": envelope})


def signed(folder: Path) -> str:
    found = [
        {"name": name, "digest": digest("sha256", folder / name), "algorithm": "sha256"} for name in names_in(folder)
    ]
    (folder / "model.sig").write_text(bundle(found, method="files", hash_type="sha256"))
    return "model.sig"


def in_parts(folder: Path, nbytes: int = 1000) -> list[dict[str, str]]:
    found = []
    for name in names_in(folder):
        data = (folder / name).read_bytes()
        for start in range(0, len(data), nbytes):
            end = min(start + nbytes, len(data))
            value = hashlib.blake2b(data[start:end]).hexdigest()
            resource = {"name": f"{name}:{start}:{end}", "digest": value, "algorithm": f"blake2b-sharded-{nbytes}"}
            found.append(resource)
    return found


def signed_in_parts(folder: Path) -> str:
    (folder / "model.sig").write_text(bundle(in_parts(folder), method="shards", hash_type="blake2b", shard_size=1000))
    return "model.sig"


KINDS = [
    tool("sha256sum"),
    tool("sha256sum", "--tag"),
    tool("sha256sum", "--binary"),
    tool("sha256sum", "--zero"),
    tool("sha512sum"),
    tool("sha1sum", "--tag"),
    tool("md5sum"),
    tool("b2sum"),
    tool("b2sum", "--tag", "--length", "128"),
    tool("shasum", "-a", "256"),
    megatron,
    signed,
    signed_in_parts,
]
ALL = pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)


@ALL
class TestEachKind:
    def test_whole(self, step, write):
        name = write(step)
        for options in (VerifyOptions(), DEEP):
            found = judge(step, options)
            [manifest] = found.manifests
            assert (found.state, found.findings, manifest.name) == (State.COMPLETE, (), name)
            n_files = len(
                [file for file in names_in(step) if file != name and (write is not megatron or "/" not in file)]
            )
            assert (manifest.n_files, manifest.n_compared) == (n_files, n_files if options is DEEP else 0)
        assert f"; {n_files} files by {name}" in cli("verify", "--deep", step).stdout
        assert f"--deep reads every byte and compares {n_files} files with {name}" in cli("verify", step).stdout
        assert beside([name]) == []

    def test_one_flipped_bit(self, step, write):
        name = write(step)
        damage.flip_byte(step / "notes.txt", 3)
        assert judge(step).state is State.COMPLETE
        found = judge(step, DEEP)
        [finding] = found.findings
        assert (found.state, finding.kind, finding.file) == (State.DAMAGED, "changed-file", "notes.txt")
        assert name in finding.message

    def test_a_missing_file(self, step, write):
        name = write(step)
        (step / "notes.txt").unlink()
        for options in (VerifyOptions(), DEEP):
            found = judge(step, options)
            [finding] = found.findings
            assert (found.state, finding.kind, finding.file) == (State.INCOMPLETE, "missing-file", "notes.txt")
            assert f"notes.txt is missing: {name} lists it" in finding.message
        [manifest] = found.manifests
        assert manifest.n_compared == manifest.n_files - 1

    def test_another_size(self, step, write):
        write(step)
        with (step / "notes.txt").open("a") as file:
            file.write("!")
        tells_sizes = write is signed_in_parts
        assert judge(step).state is (State.DAMAGED if tells_sizes else State.COMPLETE)
        assert kinds(judge(step, DEEP)) == {"changed-file"}
        damage.truncate(step / "notes.txt", 5)
        assert kinds(judge(step)) == ({"short-file"} if tells_sizes else set())
        assert judge(step, DEEP).state is (State.INCOMPLETE if tells_sizes else State.DAMAGED)


@pytest.mark.parametrize("content", ["{digest}", "{digest}\n", "{digest}  {name}\n", "{digest} */data/run/{name}\r\n"])
@pytest.mark.parametrize(("algorithm", "suffix"), [("sha256", ".sha256"), ("md5", ".md5"), ("sha512", ".sha512sum")])
def test_a_file_of_one_digest_beside_each_file(step, content, algorithm, suffix):
    for name in ("notes.txt", "__0_0.distcp"):
        text = content.format(digest=digest(algorithm, step / name), name=name)
        (step / f"{name}{suffix}").write_bytes(text.encode())
    found = judge(step, DEEP)
    assert (found.state, found.findings) == (State.COMPLETE, ())
    assert [(one.n_files, one.n_compared, one.algorithm) for one in found.manifests] == [(1, 1, algorithm)] * 2
    damage.flip_byte(step / "notes.txt", 0)
    assert [(one.kind, one.file) for one in judge(step, DEEP).findings] == [("changed-file", "notes.txt")]
    (step / "notes.txt").unlink()
    assert judge(step).state is State.INCOMPLETE


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_beside_a_single_file(tmp_path, name):
    from safetensors.numpy import save_file

    numpy = pytest.importorskip("numpy")
    file = tmp_path / "model.safetensors"
    save_file({"w": numpy.arange(100)}, file)
    if name == "model.pt":
        torch = pytest.importorskip("torch")
        file = tmp_path / name
        torch.save({"w": torch.arange(100)}, file)
    (tmp_path / f"{name}.sha256").write_text(digest("sha256", file))
    (tmp_path / "SHA256SUMS").write_text(f"{digest('sha256', file)}  {name}\n{'0' * 64}  another\n")
    found = judge(file, DEEP)
    assert [one.n_compared for one in found.manifests] == [1, 1]
    assert not kinds(found)
    damage.flip_byte(file, file.stat().st_size // 2)
    assert "changed-file" in kinds(judge(file, DEEP))
    (tmp_path / f"{name}.sha256").write_text("")
    assert kinds(judge(file)) == {"bad-manifest"}


class TestWhatRealOnesHold:
    @pytest.fixture
    def model(self, tmp_path):
        folder = whole(tmp_path / "model")
        (folder / "a.bin").write_bytes(b"hello")
        (folder / "sub").mkdir()
        (folder / "sub" / "b c.bin").write_bytes(bytes(3000))
        return folder

    @pytest.mark.parametrize(("kind", "algorithm"), [("files", "sha256"), ("shards", "blake2b")])
    def test_signatures_of_model_signing(self, model, kind, algorithm):
        shutil.copy(SIGNATURES / f"{kind}.sig", model / "model.sig")
        found = judge(model, DEEP)
        assert (found.state, found.findings, found.side_files.n_unproven) == (State.COMPLETE, (), 0)
        assert found.manifests == (("model.sig", algorithm, 2, 2),)
        damage.flip_byte(model / "sub" / "b c.bin", 2999)
        assert [one.file for one in judge(model, DEEP).findings] == ["sub/b c.bin"]

    def test_an_algorithm_that_is_not_computed_is_said(self, model):
        shutil.copy(SIGNATURES / "blake3.sig", model / "model.sig")
        found = judge(model, DEEP)
        assert [one.kind for one in found.findings] == ["not-compared"]
        assert (found.state, found.manifests, found.side_files.n_unproven) == (
            State.COMPLETE,
            (("model.sig", "blake3", 2, 0),),
            2,
        )
        (model / "a.bin").unlink()
        assert judge(model).state is State.INCOMPLETE

    def test_several_signatures_in_one_file(self, model):
        lines = [json.dumps(json.loads((SIGNATURES / f"{kind}.sig").read_text())) for kind in ("files", "shards")]
        (model / "claims.jsonl").write_text("\n".join(lines) + "\n")
        assert judge(model, DEEP).manifests == (("claims.jsonl", "blake2b, sha256", 2, 2),)

    def test_a_digest_that_was_changed_in_a_signature(self, model):
        """The digest over all of them tells that it is the signature, not the file, that is wrong."""
        fields = json.loads((SIGNATURES / "files.sig").read_text())
        statement = base64.b64decode(fields["dsseEnvelope"]["payload"]).replace(b"2cf24dba", b"2cf24dbb")
        fields["dsseEnvelope"]["payload"] = base64.b64encode(statement).decode()
        (model / "model.sig").write_text(json.dumps(fields))
        assert kinds(judge(model, DEEP)) == {"bad-manifest"}

    def test_names_with_line_breaks_and_backslashes(self, step):
        if not shutil.which("sha256sum"):
            pytest.skip("no sha256sum here")
        (step / ODD).write_text("x")
        for options in ([], ["--tag"]):
            found = subprocess.run(["sha256sum", *options, ODD], cwd=step, capture_output=True, check=True)
            assert found.stdout.startswith(b"\\")
            (step / "SHA256SUMS").write_bytes(found.stdout)
            assert judge(step, DEEP).manifests == (("SHA256SUMS", "sha256", 1, 1),)

    def test_one_that_a_shell_made_before_it_listed_it(self, step):
        if not shutil.which("sha256sum"):
            pytest.skip("no sha256sum here")
        (step / "SHA256SUMS.txt").touch()
        subprocess.run("sha256sum ./*.* > SHA256SUMS.txt", shell=True, cwd=step, check=True)
        assert f"{hashlib.sha256().hexdigest()}  ./SHA256SUMS.txt" in (step / "SHA256SUMS.txt").read_text()
        found = judge(step, DEEP)
        assert (found.state, found.findings) == (State.COMPLETE, ())

    @pytest.mark.parametrize("above", ["step_1/", "./step_1/", "run/step_1/", "/data/run/step_1/"])
    def test_one_that_was_written_from_a_folder_above(self, step, above):
        lines = [f"{digest('sha256', step / name)}  {above}{name}\n" for name in ("notes.txt", "config/a b.yaml")]
        (step / "SHA256SUMS").write_text("".join(lines))
        found = judge(step, DEEP)
        assert (found.state, found.findings) == (State.COMPLETE, ())
        assert found.manifests == (("SHA256SUMS", "sha256", 2, 2),)

    @pytest.mark.parametrize(
        "line", ["SHA2-256(notes.txt)= {}", "{} notes.txt", "\ufeff{}  notes.txt", "# made by hand\n\n{}  notes.txt"]
    )
    @pytest.mark.parametrize("name", ["SHA256SUMS", "checksums.txt", "sha256sum.txt", "CHECKSUM"])
    def test_forms_of_lines(self, step, line, name):
        (step / name).write_text(line.format(digest("sha256", step / "notes.txt").upper()))
        assert judge(step, DEEP).manifests == ((name, "sha256", 1, 1),)

    def test_in_a_part(self, tmp_path):
        for part in ("actor", "critic"):
            megatron(whole(tmp_path / "step_1" / part))
        found = judge(tmp_path / "step_1", DEEP)
        assert [one.name for one in found.manifests] == ["actor/integrity.json", "critic/integrity.json"]
        damage.flip_byte(tmp_path / "step_1" / "critic" / "__0_0.distcp", 5000)
        changed = [one for one in judge(tmp_path / "step_1", DEEP).findings if one.kind == "changed-file"]
        assert [one.file for one in changed] == ["critic/__0_0.distcp"]
        assert "critic/integrity.json" in changed[0].message

    def test_what_lies_behind_a_link_to_a_folder(self, step, tmp_path):
        (step / "config").rename(tmp_path / "elsewhere")
        (step / "config").symlink_to(tmp_path / "elsewhere")
        (step / "SHA256SUMS").write_text(f"{digest('sha256', step / 'config' / 'a b.yaml')}  config/a b.yaml\n")
        assert judge(step, DEEP).manifests == (("SHA256SUMS", "sha256", 1, 1),)
        damage.flip_byte(tmp_path / "elsewhere" / "a b.yaml", 0)
        assert kinds(judge(step, DEEP)) == {"changed-file"}


class TestOfOtherFilesThanThese:
    @pytest.mark.parametrize("write", [megatron, signed])
    def test_all_were_rewritten(self, step, write):
        name = write(step)
        for file in names_in(step):
            if file != name and file.endswith((".txt", ".yaml")):
                damage.flip_byte(step / file, 0)
        files = json.loads((step / "integrity.json").read_text())["files"] if write is megatron else {}
        if write is megatron:
            (step / "integrity.json").write_text(json.dumps({"files": dict.fromkeys(files, "0" * 64)}))
        else:
            found = [
                {"name": file, "digest": "0" * 64, "algorithm": "sha256"} for file in names_in(step) if file != name
            ]
            (step / name).write_text(bundle(found))
        found = judge(step, DEEP)
        [finding] = found.findings
        assert (found.state, finding.kind, finding.file) == (State.DAMAGED, "changed-file", name)
        assert f"{name} is of other files than these" in finding.message
        assert "remove it or write it anew" in finding.next_step

    def test_none_is_there(self, step):
        (step / "SHA256SUMS").write_text("".join(f"{'0' * 64}  images/{n}.png\n" for n in range(100)))
        [finding] = judge(step).findings
        assert (finding.kind, finding.message) == (
            "missing-file",
            "none of the 100 files that SHA256SUMS lists is here, such as images/0.png",
        )

    def test_a_file_that_the_metadata_misses_too_is_told_once(self, step):
        megatron(step)
        (step / "__1_0.distcp").unlink()
        assert [one.file for one in judge(step).findings if one.kind == "missing-file"] == ["__1_0.distcp"]


class TestBadOnes:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("integrity.json", b""),
            ("integrity.json", b'{"algorithm": "sha256", "files": {"notes.txt": "ab'),
            ("integrity.json", b'{"files": {"notes.txt": 7}}'),
            ("integrity.json", b'{"files": {"notes.txt": "7"}}'),
            ("integrity.json", b'{"files": {"notes.txt": "' + b"g" * 64 + b'"}}'),
            ("integrity.json", b'{"files": ' + b"9" * 20_000 + b"}"),
            ("integrity.json", b"[" * 100_000),
            ("SHA256SUMS", b""),
            ("SHA256SUMS", bytes(4096)),
            ("SHA256SUMS", b"all is well\n"),
            ("SHA256SUMS", b"0" * 64 + b"  " + b"x" * 5000),
            ("SHA256SUMS", b"ab" * (4 << 20)),
            ("SHA256SUMS", b"X (" + b")=ab" * (1 << 20) + b"!"),
            ("SHA256SUMS", b"d41d8cd98f00b204e9800998ecf8427e  notes.txt\n"),
            ("notes.txt.sha256", b"\xff\xfe\x00"),
            ("model.sig", b'{"dsseEnvelope": {"payload": "&"}}'),
            ("model.sig", b'{"dsseEnvelope": []'),
            ("model.sig", b'{"dsseEnvelope": {"payload": "W10="}}'),
        ],
        ids=lambda part: str(part)[:60],
    )
    def test_one_that_cannot_be_understood(self, step, name, content):
        (step / name).write_bytes(content)
        os.utime(step / name, (0, 0))
        for options in (VerifyOptions(grace=0), DEEP._replace(grace=0)):
            found = judge(step, options)
            assert (found.state, kinds(found), found.manifests) == (State.UNMARKED, {"bad-manifest"}, ())
        assert cli("verify", "--grace", "0s", step).returncode == 1

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("integrity.json", b'{"violations": []}'),
            ("checksums.txt", b"Adler-32: 5\n"),
            ("model.sig", b"-----BEGIN PGP SIGNATURE-----"),
            ("model.sig", b"\x89\x02\x33"),
            ("model.sig", b'{"messageSignature": {"messageDigest": {}}}'),
            ("model.sigstore.json", b'{"dsseEnvelope": {"payload": "e30="}}'),
        ],
        ids=str,
    )
    def test_a_file_of_another_kind_with_such_a_name(self, step, name, content):
        (step / name).write_bytes(content)
        found = judge(step, DEEP)
        assert (found.state, found.findings, found.manifests) == (State.COMPLETE, (), ())

    def test_one_that_is_too_large(self, step):
        with (step / "SHA256SUMS").open("wb") as file:
            file.truncate(MAX_MANIFEST_NBYTES + 1)
        assert kinds(judge(step, VerifyOptions(grace=0))) == {"bad-manifest"}

    def test_a_save_killed_as_it_wrote_one_may_be_going_on(self, step):
        megatron(step)
        damage.truncate(step / "integrity.json", 100)
        found = judge(step)
        assert (found.state, found.reason.partition(",")[0]) == (State.IN_PROGRESS, "a manifest not yet whole")

    @pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/../../x", "C:\\x", "..\\x", "../step_1/notes.txt"])
    def test_names_that_leave_the_folder(self, step, name):
        outside = step.parent / "x"
        outside.write_text("x")
        lines = [f"{digest('sha256', outside)}  {name}", f"{digest('sha256', step / 'notes.txt')}  notes.txt"]
        (step / "SHA256SUMS").write_text("\n".join(lines))
        found = judge(step, DEEP)
        [finding] = found.findings
        assert (found.state, finding.kind, finding.severity) == (State.COMPLETE, "path-escape", Severity.WARNING)
        assert found.manifests == (("SHA256SUMS", "sha256", 1, 1),)

    def test_lines_that_are_none(self, step):
        lines = ["one", f"{digest('sha256', step / 'notes.txt')}  notes.txt", f"{'0' * 63}  .metadata", "\x1b[31m"]
        (step / "SHA256SUMS").write_text("\n".join(lines))
        found = judge(step, DEEP)
        assert [one.kind for one in found.findings] == ["manifest-line"]
        assert "3 lines that cannot be understood, the first 'one'" in found.findings[0].message
        assert "\x1b" not in cli("verify", step).stdout

    @pytest.mark.parametrize(
        "change",
        [
            lambda found: found[1:],
            lambda found: [*found, found[0]],
            lambda found: [one | {"name": one["name"].replace(":0:1000", ":0:1001")} for one in found],
            lambda found: [one | {"name": one["name"].replace(":1000", ":" + "9" * 30)} for one in found],
            lambda found: [one | {"name": one["name"].replace(":", "/")} for one in found],
        ],
        ids=["lacks one", "one twice", "overlap", "huge", "no parts"],
    )
    def test_parts_that_are_not_one_after_another(self, step, change):
        (step / "model.sig").write_text(bundle(change(in_parts(step)), method="shards"))
        assert kinds(judge(step, VerifyOptions(grace=0))) == {"bad-manifest"}

    def test_two_digests_of_one_file(self, step):
        right, wrong = digest("sha256", step / "notes.txt"), "0" * 64
        for first, second in ((right, wrong), (wrong, right)):
            (step / "SHA256SUMS").write_text(f"{first}  notes.txt\n{second}  ./notes.txt\n")
            assert kinds(judge(step, DEEP)) == {"changed-file"}

    def test_an_io_error_while_hashing(self, step, monkeypatch):
        megatron(step)
        read_into = LocalStorage.read_into

        def failing(storage, name, *args):
            if name == "notes.txt":
                raise StorageError(f"{name}: Input/output error")
            return read_into(storage, name, *args)

        monkeypatch.setattr(LocalStorage, "read_into", failing)
        found = judge(step, DEEP)
        assert (found.state, kinds(found)) == (State.UNREADABLE, {"unreadable"})

    @given(
        st.binary(max_size=300), st.sampled_from(["SHA256SUMS", "integrity.json", "model.sig", "a.md5", "checksums"])
    )
    def test_any_bytes(self, tmp_path_factory, data, name):
        folder = tmp_path_factory.mktemp("any")
        (folder / name).write_bytes(data)
        manifests, problems = read_manifests(locate(folder).storage, {name: len(data)})
        assert len(manifests) + len(problems) <= 3


class TestDigests:
    @given(st.integers(0, 50), st.lists(st.integers(0, 50), max_size=6), st.integers(1, 20))
    def test_parts_in_one_read(self, tmp_path_factory, nbytes, cuts, piece_nbytes):
        folder = tmp_path_factory.mktemp("digests")
        data = bytes(range(nbytes))
        (folder / "f").write_bytes(data)
        storage = locate(folder).storage
        storage.piece_nbytes = piece_nbytes
        bounds = sorted({0, nbytes, *(cut for cut in cuts if cut <= nbytes)})
        wanted = [WantedDigest("md5", 16, *part) for part in itertools.pairwise(bounds)]
        wanted += [WantedDigest("sha256", 32), WantedDigest("blake2b", 20, 0, nbytes)]
        found = digests(storage, "f", nbytes, wanted)
        assert found.keys() == set(wanted)
        for one, value in found.items():
            part = data[one.start : one.end]
            right = (
                hashlib.blake2b(part, digest_size=20)
                if one.algorithm == "blake2b"
                else hashlib.new(one.algorithm, part)
            )
            assert value == right.hexdigest()

    def test_a_file_that_all_vouch_for_is_read_once(self, step, monkeypatch):
        tool("sha256sum")(step)
        megatron(step)
        dcptool.mark_complete(step, checksums=True)
        reads = []
        read_into = LocalStorage.read_into

        def counting(storage, name, byte_offset, out):
            reads.append(name)
            return read_into(storage, name, byte_offset, out)

        monkeypatch.setattr(LocalStorage, "read_into", counting)
        found = judge(step, DEEP)
        assert (found.state, found.findings) == (State.COMPLETE, ())
        assert [reads.count(name) for name in ("notes.txt", "config/a b.yaml", "SHA256SUMS")] == [1, 1, 1]
        assert sha256(locate(step).storage, "notes.txt", 28) == digest("sha256", step / "notes.txt")


class TestWhereTheyLie:
    @pytest.mark.parametrize(
        "name",
        [
            "integrity.json", "SHA256SUMS", "sha256sums.txt", "SHA512SUMS", "MD5SUMS", "B2SUMS", "checksums.txt",
            "CHECKSUM", "model.pt.sha256", "rank_0.pt.md5", "x.sha512", "x.sha256sum", "model.sig", "model_signature",
            "claims.jsonl",
        ],
    )  # fmt: skip
    def test_names(self, name):
        assert is_manifest_name(name)
        assert is_manifest_name(f"a/{name}")
        assert beside([name]) == []
        assert patterns_of([name, f"a/{name}"], "_COMPLETE") == frozenset()

    @pytest.mark.parametrize(
        "name", ["model.pt", "sha256.pt", "x_integrity.json", ".sha256", "notes.txt", "md5", ".sig"]
    )
    def test_other_names(self, name):
        assert is_manifest_name(name) is is_manifest_name(f"a/{name}") is (name == "md5")

    def test_a_step_without_one_lacks_nothing(self, tmp_path):
        for number in (1, 2, 3):
            step = whole(tmp_path / f"step_{number}")
            if number < 3:
                megatron(step)
                (step / "__0_0.distcp.sha256").write_text(digest("sha256", step / "__0_0.distcp"))
        report = dcptool.verify(tmp_path)
        assert report.good
        assert not any(verdict.findings for verdict in report.verdicts)

    def test_json(self, step):
        tool("sha256sum")(step)
        [verdict] = json.loads(cli("verify", "--deep", "--json", step).stdout)["checkpoints"]
        told = {"name": "SHA256SUMS", "algorithm": "sha256", "n_files": 5, "n_compared": 5}
        assert verdict["manifests"] == [told]
        assert verdict["side_files"]["n_unproven"] == 0

    def test_many(self, step):
        for name in names_in(step):
            (step / f"{name}.md5").write_text(digest("md5", step / name))
        assert "1 file by .metadata.md5, 1 file by __0_0.distcp.md5 and 2 more" in cli("verify", "--deep", step).stdout
