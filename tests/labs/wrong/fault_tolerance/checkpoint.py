"""Lab 13, checkpoints: each body, written after the solution, is a wrong answer."""


def written_in_place():
    """The file has its name before it has its content, and there is no other.

    kind: values
    hint: load gives
    """

    def save(folder, state, step):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        own = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        torch.save((step, own), folder / "newest.checkpoint")

    def load(folder):
        try:
            return torch.load(Path(folder) / "newest.checkpoint", weights_only=True)
        except Exception as error:
            if not isinstance(error, FileNotFoundError):
                warnings.warn(f"newest.checkpoint: {error}")
            return None


def one_generation():
    """Only the newest is kept.

    kind: sizes
    hint: load gives None, and the checkpoint of step 1 is whole
    """

    KEEP = 1


def keeps_all():
    """Nothing is ever removed.

    kind: memory
    hint: do old ones go?
    """

    KEEP = 1000


def no_hash():
    """What can be read is taken for undamaged.

    kind: values
    hint: a state that was never saved
    """

    def load(folder):
        for path in checkpoints(Path(folder)):
            try:
                return torch.load(io.BytesIO(path.read_bytes()[32:]), weights_only=True)
            except Exception:
                warnings.warn(f"{path} is damaged")
        return None


def adds_up_the_bytes():
    """A sum of the bytes: two that change places are not seen.

    kind: part
    hint: have changed places | load raises
    """

    class hashlib:
        class sha256:
            def __init__(self, data):
                self._sum = sum(data)

            def digest(self):
                return self._sum.to_bytes(32, "little")


def hash_of_the_beginning():
    """Of a large file only the first kilobytes are looked at.

    kind: part
    hint: a state that was never saved
    """

    import hashlib as real

    class hashlib:
        def sha256(data):
            return real.sha256(data[:2048])


def says_nothing():
    """The one before is taken without a word.

    kind: part
    hint: the warning that names a damaged file of step 2 is missing
    """

    class warnings:
        def warn(*_, **__):
            pass


def names_nothing():
    """The warning does not tell which one is damaged.

    kind: part
    hint: and the warning that names a damaged file
    """

    import warnings as real

    class warnings:
        def warn(*_, **__):
            real.warn("something is damaged", stacklevel=2)


def raises_at_damage():
    """A damaged one ends the run.

    kind: values
    hint: load raises ValueError
    """

    class warnings:
        def warn(text, **_):
            raise ValueError(text)


def removes_what_is_damaged():
    """load tidies up.

    kind: inputs
    hint: load changes the folder: it only reads
    """

    own_load = load

    def load(folder):
        for path in Path(folder).glob("step-*") if Path(folder).is_dir() else ():
            path.touch()
            path.with_name("newest").write_text(path.name)
        return own_load(folder)


def the_file_is_not_synced():
    """Only the folder is synced: the name is there, its content is not.

    kind: luck
    hint: Which contents of files had not been synced by then?
    """

    import types

    def only_folders(number):
        import stat

        if stat.S_ISDIR(real.fstat(number).st_mode):
            real.fsync(number)

    import os as real

    os = types.SimpleNamespace(fsync=only_folders, open=real.open, close=real.close, O_RDONLY=0)


def the_folder_is_not_synced():
    """The content is there, its name is not.

    kind: luck
    hint: Which names had not been synced by then?
    """

    def sync(folder):
        pass


def removes_first():
    """The one before goes before the new one is there.

    kind: step
    hint: load gives None
    """

    own_save = save

    def save(folder, state, step):
        for path in checkpoints(Path(folder)):
            path.unlink()
        own_save(folder, state, step)


def leaves_what_killed_ones_left():
    """The unfinished files of killed saves stay for ever.

    kind: memory
    hint: Does save remove what a killed one has left
    """

    import tempfile

    def save(folder, state, step):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        os.sync()
        own = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        memory = io.BytesIO()
        torch.save((step, own), memory)
        data = memory.getvalue()
        number, beside = tempfile.mkstemp(dir=folder)
        with open(number, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(number)
        os.replace(beside, folder / f"step-{step}.checkpoint")
        sync(folder)
        for path in checkpoints(folder):
            if step_of(path) > step:
                path.unlink()
                sync(folder)
        for path in checkpoints(folder)[KEEP:]:
            path.unlink()


def removes_only_its_own_unfinished_file():
    """An unfinished file goes only when the same step is saved again.

    kind: memory
    hint: Does save remove what a killed one has left
    """

    def save(folder, state, step):
        folder = Path(folder)
        for new in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            new.mkdir()
            sync(new.parent)
        own = {n: v.detach().clone() if hasattr(v, "clone") else v for n, v in state.items()}
        memory = io.BytesIO()
        torch.save((step, own), memory)
        data = memory.getvalue()
        beside = folder / f".step-{step}.partial"
        with beside.open("wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / f"step-{step}.checkpoint")
        sync(folder)
        before = [path for path in checkpoints(folder) if step_of(path) <= step]
        for path in checkpoints(folder):
            if path not in before[:KEEP]:
                path.unlink()
        sync(folder)


def what_is_given_up_comes_back():
    """The names of later steps go, and the folder is not synced after that.

    kind: odd
    hint: has returned: load gives step 9
    """

    def save(folder, state, step):
        folder = Path(folder)
        for new in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            new.mkdir()
            sync(new.parent)
        own = {n: v.detach().clone() if hasattr(v, "clone") else v for n, v in state.items()}
        memory = io.BytesIO()
        torch.save((step, own), memory)
        data = memory.getvalue()
        beside = folder / f".step-{step}.partial"
        with beside.open("wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / f"step-{step}.checkpoint")
        sync(folder)
        before = [path for path in checkpoints(folder) if step_of(path) <= step]
        for path in checkpoints(folder):
            if path not in before[:KEEP]:
                path.unlink()
        for path in folder.glob(".step-*.partial"):
            path.unlink()


def a_new_folder_is_not_synced():
    """The folder that save has made is a name in another one.

    kind: luck
    hint: Which names had not been synced by then?
    """

    own_save = save

    def save(folder, state, step):
        Path(folder).mkdir(parents=True, exist_ok=True)
        own_save(folder, state, step)


def removes_what_is_others():
    """All that is not the newest goes.

    kind: inputs
    hint: it is others'
    """

    own_save = save

    def save(folder, state, step):
        own_save(folder, state, step)
        for path in Path(folder).glob("*.tmp"):
            path.unlink()


def sorts_names_as_texts():
    """Step 9 comes after step 10.

    kind: sizes
    hint: load gives step 9 after save for step 10
    """

    def checkpoints(folder):
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted((p for p in found if NAME.fullmatch(p.name)), reverse=True)


def keeps_what_is_beyond():
    """A run that has gone back finds its old future.

    kind: odd
    hint: load gives
    """

    def save(folder, state, step):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        own = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        memory = io.BytesIO()
        torch.save((step, own), memory)
        data = memory.getvalue()
        beside = folder / f".step-{step}.partial"
        with beside.open("wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(folder / f"step-{step}.checkpoint")
        sync(folder)
        for path in [*checkpoints(folder)[KEEP:], *folder.glob(".step-*")]:
            path.unlink()


def skips_a_step_that_is_there():
    """A checkpoint of this step is there, damaged or not.

    kind: odd
    hint: load gives 4
    """

    own_save = save

    def save(folder, state, step):
        if not (Path(folder) / f"step-{step}.checkpoint").exists():
            own_save(folder, state, step)


def views_as_they_are():
    """A small view is saved with all that it is a view of.

    kind: memory
    hint: Is a view saved with all that it is a view of?
    """

    def save(folder, state, step):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        memory = io.BytesIO()
        torch.save((step, state), memory)
        data = memory.getvalue()
        beside = folder / f".step-{step}.partial"
        beside.write_bytes(hashlib.sha256(data).digest() + data)
        beside.replace(folder / f"step-{step}.checkpoint")


def all_in_float32():
    """Tensors lose their type.

    kind: types
    hint: was saved
    """

    own_save = save

    def save(folder, state, step):
        own_save(
            folder,
            {n: v.float() if isinstance(v, torch.Tensor) else v for n, v in state.items()},
            step,
        )


def numbers_as_tensors():
    """Numbers come back as tensors.

    kind: types
    hint: was saved
    """

    own_save = save

    def save(folder, state, step):
        own = {n: torch.tensor(v) if isinstance(v, float) else v for n, v in state.items()}
        own_save(folder, own, step)


def the_tensors_only():
    """Numbers are left out.

    kind: part
    hint: is missing
    """

    own_save = save

    def save(folder, state, step):
        own_save(folder, {n: v for n, v in state.items() if isinstance(v, torch.Tensor)}, step)


def a_link_to_what_is_written_next():
    """The new name is a hard link to the file that the next save empties first.

    kind: step
    hint: load gives
    """

    def save(folder, state, step):
        os.makedirs(folder, exist_ok=True)
        own = {n: v.detach().clone() if hasattr(v, "clone") else v for n, v in state.items()}
        memory = io.BytesIO()
        torch.save((step, own), memory)
        data = memory.getvalue()
        beside, place = Path(folder) / ".step-0.partial", Path(folder) / f"step-{step}.checkpoint"
        with beside.open("wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
            file.flush()
            os.fsync(file)
        for path in checkpoints(Path(folder)):
            if step_of(path) >= step:
                path.unlink()
        os.link(beside, place)
        sync(folder)
        for path in checkpoints(Path(folder))[KEEP:]:
            path.unlink()
        beside.unlink()


def the_file_that_was_changed_last():
    """In a copy of the folder, and after damage, the times are others.

    kind: luck
    hint: load gives
    """

    def checkpoints(folder):
        found = folder.iterdir() if folder.is_dir() else ()
        found = [path for path in found if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def says_nothing_of_a_full_disk():
    """The run believes that it has saved.

    kind: odd
    hint: on a full disk save returns as if it had saved
    """

    own_save = save

    def save(folder, state, step):
        try:
            own_save(folder, state, step)
        except OSError as error:
            return error


def in_memory():
    """What this process has saved is taken from its memory.

    kind: luck
    hint: load gives
    """

    kept = {}

    own_load = load

    def save(folder, state, step):
        kept[str(folder)] = (
            step,
            {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()},
        )

    def load(folder):
        return kept.get(str(folder)) or own_load(folder)


def in_the_background():
    """A thread writes, and nobody waits for it.

    kind: luck
    hint: load gives | after save
    """

    import threading

    own_save = save

    def save(folder, state, step):
        own = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        threading.Thread(target=own_save, args=(folder, own, step)).start()


def runs_what_it_reads():
    """A file is read by a pickle that runs code.

    kind: library
    hint: runs code
    """

    own_load = torch.load

    def load(folder):
        for path in checkpoints(Path(folder)):
            content = path.read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                return own_load(io.BytesIO(content[32:]), weights_only=False)
            warnings.warn(f"{path} is damaged")
        return None


def with_pickle():
    """The same, in its own name.

    kind: library
    hint: that is the library
    """

    import pickle

    def load(folder):
        return pickle.loads((Path(folder) / "newest").read_bytes())


def changes_the_state():
    """The caller's state gets another entry.

    kind: inputs
    hint: the caller's state is not what it was
    """

    own_save = save

    def save(folder, state, step):
        state["saved at"] = step
        own_save(folder, state, step)


def for_ever():
    """Waits for a lock that a killed one still holds.

    kind: end
    hint: no end after
    """

    own_save = save

    def save(folder, state, step):
        lock = Path(folder) / ".lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        os.sync()
        while True:
            try:
                lock.touch(exist_ok=False)
                break
            except FileExistsError:
                pass
        own_save(folder, state, step)
        lock.unlink()
