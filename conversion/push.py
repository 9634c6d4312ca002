"""Uploads a converted folder to the Hugging Face Hub."""

from ..common.errors import UserError, one_line
from ..common.files import redacted


def _told(error):
    return redacted(one_line(error, 300))


def check_push(repo):
    """Before any work: a well-formed name, a token, and a Hub that answers."""
    import huggingface_hub
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            f"--push-to-hub takes USER/NAME, but {repo!r} was given ({_told(error)})."
        ) from None
    if not huggingface_hub.get_token():
        raise UserError("--push-to-hub needs a token: run 'hf auth login', or set HF_TOKEN.")
    try:
        huggingface_hub.HfApi().whoami()
    except Exception as error:  # requests, httpx and the Hub's own errors
        raise UserError(
            f"--push-to-hub: the Hub cannot be reached or refuses the token ({_told(error)})."
        ) from None


def push(folder, repo, private, revision):
    """Creates the repository (and branch) if needed and uploads the folder; returns the address of
    the commit."""
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
        message = "Convert the training checkpoint"
        return str(
            api.upload_folder(
                repo_id=repo, folder_path=str(folder), revision=revision, commit_message=message
            )
        )
    except Exception as error:  # requests, httpx and the Hub's own errors
        raise UserError(
            f"{folder} is written, but uploading it to {repo} failed ({_told(error)}); later: hf "
            f"upload {repo} {folder}"
        ) from None
