"""What every stage does around its own work: skip, refuse, resume, record."""

import os
import subprocess
import sys

import pytest

from pipeline.errors import PipelineError
from pipeline.manifest import load_manifest
from pipeline.stage import StageResult, put_aside, run_stage
from tests.test_manifest import target


class Work:
    """Writes one file, and counts how often it was called and what it found."""

    def __init__(self, name, content="x", fail_after=False):
        self.name, self.content, self.fail_after, self.calls, self.found = name, content, fail_after, 0, []

    def __call__(self, manifest, folder):
        self.calls += 1
        self.found = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
        (folder / f"{self.name}.out").write_text(self.content)
        if self.fail_after:
            raise RuntimeError("killed")
        return StageResult([folder / f"{self.name}.out"], counts={"files": 1})


def run(run_dir, name="prompts", work=None, config=None, **options):
    work = work or Work(name)
    run_stage(name, run_dir, target=options.pop("target", target()), config=config or {"a": 1}, seed=0, work=work,
              **options)
    return work


def test_done_once_then_up_to_date(tmp_path, capsys):
    assert run(tmp_path).calls == 1
    assert run(tmp_path).calls == 0
    assert "up to date" in capsys.readouterr().out
    assert run(tmp_path, force=True).calls == 1
    record = load_manifest(tmp_path).stages["prompts"]
    assert record.counts == {"files": 1} and record.outputs[0].path == "prompts/prompts.out"
    assert record.versions["torch"]


def test_redone_when_configuration_input_or_output_changes(tmp_path):
    run(tmp_path)
    run(tmp_path, "dump")
    assert run(tmp_path, "dump", config={"a": 2}).calls == 1
    assert run(tmp_path, "dump", config={"a": 2}).calls == 0
    (tmp_path / "dump" / "dump.out").unlink()
    assert run(tmp_path, "dump", config={"a": 2}).calls == 1
    run(tmp_path, "prompts", Work("prompts", content="other"), force=True)
    assert run(tmp_path, "dump", config={"a": 2}).calls == 1


def test_an_unfinished_earlier_stage_is_named_with_its_command(tmp_path):
    with pytest.raises(PipelineError, match="stage dump needs stage prompts") as e:
        run(tmp_path, "dump")
    assert e.value.fix == f"make prompts RUN={tmp_path.name}"


@pytest.mark.parametrize("damage, words", [
    (lambda p: p.unlink(), "is missing"), (lambda p: p.write_text(""), "truncated"), (lambda p: p.write_text("y"), "altered"),
])
def test_a_damaged_input_is_refused_by_name(tmp_path, damage, words):
    run(tmp_path)
    damage(tmp_path / "prompts" / "prompts.out")
    with pytest.raises(PipelineError, match=words) as e:
        run(tmp_path, "dump")
    assert "prompts/prompts.out" in str(e.value) and "make prompts" in e.value.fix


@pytest.mark.parametrize("field", ["architecture", "tokenizer_sha256", "chat_template_sha256", "config_sha256"])
def test_a_manifest_of_another_target_or_template_is_refused(tmp_path, field):
    run(tmp_path)
    with pytest.raises(PipelineError, match=f"another target .*: {field} is"):
        run(tmp_path, target=target(**{field: "other"}))


def test_a_moved_target_is_the_same_target(tmp_path):
    run(tmp_path)
    assert run(tmp_path, target=target(path="/elsewhere/x")).calls == 0


def test_an_interrupted_stage_finds_its_own_files_again_and_no_others(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path, work=Work("prompts", fail_after=True))
    assert "prompts" not in load_manifest_or_empty(tmp_path)
    assert run(tmp_path).found == ["prompts.out"]          # same plan: resumed from
    with pytest.raises(RuntimeError):
        run(tmp_path, work=Work("prompts", fail_after=True), config={"a": 2})
    assert run(tmp_path, config={"a": 3}).found == []      # another plan
    assert run(tmp_path, config={"a": 3}, force=True).found == []


def test_a_stage_that_fails_while_redoing_leaves_no_record_of_the_old_outputs(tmp_path):
    run(tmp_path)
    with pytest.raises(RuntimeError):
        run(tmp_path, work=Work("prompts", fail_after=True), force=True)
    with pytest.raises(PipelineError, match="has not finished"):
        run(tmp_path, "dump")


def load_manifest_or_empty(run_dir):
    manifest = load_manifest(run_dir)
    return manifest.stages if manifest else {}


def test_two_stages_in_one_run_folder_do_not_run_at_once(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
         "print('held', flush=True); time.sleep(60)", str(tmp_path / ".lock")], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        with pytest.raises(PipelineError, match="another stage is running"):
            run(tmp_path)
    finally:
        holder.kill()
        holder.wait()


def test_an_unwritable_folder_is_one_message(tmp_path, monkeypatch):
    if os.geteuid() == 0:  # root may write anywhere: a file in the way of a folder stands for it
        (tmp_path / "runs").write_text("")
        with pytest.raises(PipelineError, match="cannot write"):
            run(tmp_path / "runs" / "demo")
    else:
        tmp_path.chmod(0o500)
        with pytest.raises(PipelineError, match="cannot be written"):
            run(tmp_path / "demo")


def test_an_input_made_from_another_input_than_the_run_holds_is_refused(tmp_path):
    for name in ("prompts", "dump", "standardize", "train"):
        run(tmp_path, name)
    run(tmp_path, "dump", Work("dump", content="other"), force=True)
    with pytest.raises(PipelineError, match="standardize was made from another dump") as e:
        run(tmp_path, "train")
    assert "make standardize" in e.value.fix
    run(tmp_path, "standardize")
    with pytest.raises(PipelineError, match="train was made from another dump"):
        run(tmp_path, "export")


def test_a_stage_redone_with_other_settings_but_the_same_bytes_is_another_input(tmp_path):
    """Slots can be re-bound without a byte changing; the drafter trained before must not pass for the new wiring."""
    run(tmp_path)
    run(tmp_path, "dump")
    run(tmp_path, "standardize", config={"layers": [1, 2, 3]})
    run(tmp_path, "train")
    run(tmp_path, "standardize", config={"layers": [1, 2, 4]})
    assert run(tmp_path, "train").calls == 1


@pytest.mark.parametrize("full", [False, True])
def test_a_damaged_output_is_not_resumed_from(tmp_path, full):
    run(tmp_path)
    path = tmp_path / "prompts" / "prompts.out"
    stat = path.stat()
    path.write_text("y")
    if full:  # what size and mtime do not show is found on request
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert run(tmp_path).calls == 0
    again = run(tmp_path, full_check=full)
    assert again.calls == 1 and again.found == []


@pytest.mark.parametrize("finished", [True, False])
def test_work_is_kept_until_the_stage_has_finished_with_other_settings(tmp_path, finished):
    if finished:
        run(tmp_path)
    else:  # days of an unfinished stage are worth as much
        with pytest.raises(RuntimeError):
            run(tmp_path, work=Work("prompts", fail_after=True))
    for other in (2, 3):
        with pytest.raises(RuntimeError):
            run(tmp_path, work=Work("prompts", content="new", fail_after=True), config={"a": other})
    assert len(put_aside(tmp_path, "prompts")) == 2
    back = run(tmp_path)  # the settings of before: what they made is there again
    assert back.found == ["prompts.out"] and back.calls == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "manifest.json", "prompts"]


def test_force_gives_up_what_was_put_aside(tmp_path):
    run(tmp_path)
    with pytest.raises(RuntimeError):
        run(tmp_path, work=Work("prompts", fail_after=True), config={"a": 2})
    with pytest.raises(RuntimeError):
        run(tmp_path, work=Work("prompts", fail_after=True), config={"a": 2}, force=True)
    assert put_aside(tmp_path, "prompts") == []


def test_an_interrupted_force_goes_on(tmp_path):
    run(tmp_path)
    with pytest.raises(RuntimeError):
        run(tmp_path, work=Work("prompts", fail_after=True), force=True)
    assert run(tmp_path, force=True).found == ["prompts.out"]
    assert run(tmp_path, force=True).found == []


def test_a_stage_folder_may_be_a_link_to_another_disk(tmp_path):
    disk = tmp_path / "disk" / "hidden"
    disk.mkdir(parents=True)
    run_dir = tmp_path / "demo"
    run_dir.mkdir()
    (run_dir / "prompts").symlink_to(disk)
    run(run_dir)
    assert (disk / "prompts.out").exists()
    with pytest.raises(RuntimeError):
        run(run_dir, work=Work("prompts", fail_after=True), config={"a": 2})
    assert (run_dir / "prompts").is_symlink() and len(list(disk.parent.iterdir())) == 2  # put aside over there
    assert run(run_dir).found == ["prompts.out"] and (run_dir / "prompts").is_symlink()
    assert run(run_dir, force=True).found == [] and [p.name for p in disk.parent.iterdir()] == ["hidden"]


def test_nothing_to_do_may_still_change_the_manifest(tmp_path):
    run(tmp_path)

    def rename(manifest):
        manifest.run = "renamed"
        return True

    assert run(tmp_path, when_current=rename).calls == 0
    assert load_manifest(tmp_path).run == "renamed"
