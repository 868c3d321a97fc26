"""Names of Hugging Face's hub where a directory is wanted: meta-llama/Llama-3.2-1B, or with @REVISION behind it.

    directory("org/Name") ──► is a directory of this name here? ──► itself
                          └─► huggingface_hub (extra `hub`): its cache, where it is not there yet the hub

Only files of the names in `FILES` are fetched.
"""

import os
import re
from pathlib import Path

from meshtrain.errors import ConfigError, install_command, not_installed, short

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
# Of a repository what is read here; pickles and what lies in folders of other programs are not fetched.
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")

MESSAGE = "weights exported by meshtrain"


def is_hub_name(name: str) -> bool:
    """Returns whether a name is ORG/NAME, and none of a file here, nor of one beside others."""
    return (
        NAME.fullmatch(name) is not None
        and not os.path.lexists(name)
        and not os.path.isdir(name.partition("/")[0])
    )


def directory(path: str | Path, only: str | None = None) -> Path:
    """Returns the directory that a path names, of a hub's name the one in the hub's cache, with `only` one file or all
    that is read.

    ConfigError, with the command that fetches it, where it is neither there nor to be had.
    """
    name = str(path)
    if not is_hub_name(name):
        return Path(path).expanduser()
    repository, _, revision = name.partition("@")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        why = f"huggingface_hub would fetch it, which is not installed: {install_command('hub')}"
        raise _absent(name, why) from None
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=[only] if only else list(FILES),
                ignore_patterns=["*/*"],
            )
        )
    # of the hub, of what talks to it, or of the disk
    except Exception as error:
        raise _absent(name, reason(error)) from None


def push(directory: Path, name: str, private: bool = False) -> str:
    """Uploads a directory as one commit to a repository of the hub, which is made where it is not there; returns its
    address. ConfigError if it cannot be.
    """
    if not NAME.fullmatch(name) or "@" in name:
        raise ConfigError(f"{short(name)} names no repository; write ORG/NAME.")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise not_installed(
            f"{short(name)} is pushed by huggingface_hub", "hub"
        ) from None
    api = HfApi()
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=MESSAGE)
    # of the hub, of what talks to it, or of the disk
    except Exception as error:
        why = f"{short(directory)} cannot be pushed to {short(name)} ({reason(error)})"
        raise ConfigError(
            f"{why}; hf auth login, or HF_TOKEN, opens what is yours."
        ) from None
    return str(repository)


def repository_of(path: Path) -> str | None:
    """Returns ORG/NAME of a directory in the hub's cache, models--ORG--NAME/snapshots/REVISION; None of another."""
    kind, *parts = (
        path.absolute().parents[1].name.split("--", 2) if len(path.parts) > 2 else [""]
    )
    if kind == "models" and path.parent.name == "snapshots":
        return "/".join(parts)
    return None


def reason(error: Exception) -> str:
    """Returns what the hub, or the way to it, has said, in one line, to stand within a sentence."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return f"it answers {status}: there is none of this name, or one that HF_TOKEN does not open"
    if type(error).__name__ in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
        return "it is not in the cache, and the hub is out of reach"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return short(lines[0].rstrip(".") if lines else type(error).__name__)


def _absent(name: str, why: str) -> ConfigError:
    repository, _, revision = name.partition("@")
    target = repository.partition("/")[2]
    of = f" --revision {revision}" if revision else ""
    command = f"hf download {repository}{of} --local-dir {target}"
    return ConfigError(
        f"there is no directory {short(name)}, and Hugging Face's repository of that name cannot be read ({why}); run "
        f"{short(command)} where it can be, and give {short(target)}."
    )
