"""The table of error codes: one row a code, one runbook page a row (``docs/runbook/CODE.md``)."""

from __future__ import annotations

from typing import NamedTuple

EXIT_OK = 0
EXIT_FAILED = 1
"""The run failed or its restart budget is spent; a scheduler may requeue."""
EXIT_USAGE = 2
EXIT_DATA = 65
EXIT_INTERNAL = 70
EXIT_BUSY = 73
EXIT_IO = 74
EXIT_REQUEUE = 75
"""Stopped on request (preemption, time limit) with its state saved; requeue me (EX_TEMPFAIL)."""
EXIT_PROTOCOL = 76
EXIT_CONFIG = 78
EXIT_DO_NOT_REQUEUE = 93
"""The same failure will come again: a person must look first. 93 is what NVIDIA's launcher uses for it too."""
EXIT_GO_BACK = 94
"""Of a rank: start again, from an older checkpoint, as the circuit breaker decided."""


class Code(NamedTuple):
    """One row of the table."""

    title: str
    exit_code: int
    hint: str


CODES: dict[str, Code] = {
    # --- configuration -------------------------------------------------------------------------------------------
    "CF101": Code("unknown configuration key", EXIT_CONFIG, "Remove the key or use the suggested spelling."),
    "CF102": Code("configuration value out of range", EXIT_CONFIG, "Set a value inside the stated range."),
    "CF103": Code("configuration value of the wrong type", EXIT_CONFIG, "Use the stated type."),
    "CF104": Code("configuration file missing or unreadable", EXIT_CONFIG, "Check the path and its permissions."),
    "CF105": Code("configuration file is not valid TOML", EXIT_CONFIG, "Fix the line named in the message."),
    "CF106": Code("configuration values contradict each other", EXIT_CONFIG, "Change one of the two named keys."),
    "CF107": Code(
        "a library that this needs is not installed", EXIT_CONFIG, "Install the extra: pip install 'midwatch[NAME]'."
    ),
    # --- storage -------------------------------------------------------------------------------------------------
    "ST101": Code(
        "no space left", EXIT_IO, "Free space or lower checkpoint.keep_last; `midwatch doctor` shows the need."
    ),
    "ST102": Code("folder missing or not writable", EXIT_IO, "Create the folder or fix its owner and mode."),
    "ST103": Code(
        "read or write failed", EXIT_IO, "Look at the kernel log of this host: the disk or the mount is ill."
    ),
    "ST104": Code(
        "file is not what was written", EXIT_IO, "The storage changed bytes after a successful write; stop using it."
    ),
    "ST105": Code(
        "shared memory too small", EXIT_IO, "Enlarge /dev/shm (containers: --shm-size) or lower checkpoint memory."
    ),
    # --- checkpoints: what is wrong with one ---------------------------------------------------------------------
    "CK101": Code(
        "checkpoint is torn: it was never committed", EXIT_DATA, "Use an older one; `midwatch ckpt ls` lists them."
    ),
    "CK102": Code("checkpoint shard missing", EXIT_DATA, "Use an older verified checkpoint."),
    "CK103": Code("checkpoint shard has the wrong size", EXIT_DATA, "Use an older verified checkpoint."),
    "CK104": Code(
        "checkpoint bytes do not match their hash", EXIT_DATA, "Use an older verified checkpoint; check the disk."
    ),
    "CK105": Code(
        "shard belongs to another step, attempt or run", EXIT_DATA, "Somebody moved files; use an older one."
    ),
    "CK106": Code("manifest damaged or unreadable", EXIT_DATA, "Use an older verified checkpoint."),
    "CK107": Code("checkpoint does not cover every tensor", EXIT_DATA, "A rank's part is missing; use an older one."),
    "CK108": Code("checkpoint format is newer than this midwatch", EXIT_DATA, "Upgrade midwatch."),
    "CK109": Code("checkpoint is not signed with this run's key", EXIT_DATA, "Check checkpoint.trust.signing_key."),
    "CK110": Code("checkpoint cannot be loaded", EXIT_DATA, "The bytes are intact and yet do not load; report this."),
    # --- checkpoints: resuming -----------------------------------------------------------------------------------
    "CK201": Code(
        "no checkpoint to resume from", EXIT_DATA, "Check the folder, or allow a fresh start with mode='auto'."
    ),
    "CK202": Code(
        "checkpoints exist but none can be trusted", EXIT_DATA, "`midwatch ckpt why-not` says why each was rejected."
    ),
    "CK203": Code(
        "checkpoint belongs to another run", EXIT_DATA, "Point to this run's folder, or name the checkpoint explicitly."
    ),
    "CK204": Code("checkpoint does not fit this model", EXIT_DATA, "Use the model the checkpoint was written with."),
    "CK205": Code(
        "ranks disagree about the resume point", EXIT_DATA, "Look at the ranks' logs; all must see the same storage."
    ),
    "CK206": Code(
        "checkpoint lacks a part the run tracks", EXIT_DATA, "Use a complete one or stop tracking that part."
    ),
    "CK207": Code(
        "checkpoint belongs to another configuration",
        EXIT_DATA,
        "Restore it, or say why the change is meant: run.resume(accept='why') or checkpoint.resume.accept.",
    ),
    "CK208": Code(
        "every resume from this checkpoint failed", EXIT_DATA, "`midwatch ckpt why-not` counts the attempts."
    ),
    # --- checkpoints: saving -------------------------------------------------------------------------------------
    "CK301": Code(
        "a background save failed", EXIT_DATA, "The message names the cause; the last verified checkpoint is intact."
    ),
    "CK302": Code(
        "the writer process died", EXIT_DATA, "It was restarted; that save is lost, the last verified one is intact."
    ),
    "CK303": Code("ranks missing at commit", EXIT_DATA, "The named ranks did not deliver their shard in time."),
    "CK304": Code(
        "state cannot be saved without running code", EXIT_DATA, "Return plain values and tensors from state_dict()."
    ),
    "CK305": Code("tracked object has no state", EXIT_DATA, "Give it state_dict() and load_state_dict()."),
    "CK306": Code(
        "ranks hold different tensors", EXIT_DATA, "Track the same model on every rank, or shard it with DTensor."
    ),
    "CK307": Code(
        "state changed while it was copied", EXIT_DATA, "Set checkpoint.staging.overlap = false for this script."
    ),
    # --- checkpoints: fencing ------------------------------------------------------------------------------------
    "CK401": Code(
        "a newer attempt holds the run", EXIT_DATA, "Nothing to do: this process outlived its attempt and must end."
    ),
    # --- ledger --------------------------------------------------------------------------------------------------
    "LG101": Code(
        "ledger chain broken", EXIT_DATA, "Someone edited or damaged the file named; keep a copy and investigate."
    ),
    "LG102": Code("ledger is held by another writer", EXIT_BUSY, "One writer a file: find the other process."),
    "LG103": Code("no ledger here", EXIT_DATA, "Point to a run folder."),
    # --- metrics -------------------------------------------------------------------------------------------------
    "MT101": Code("metrics file cannot be read", EXIT_DATA, "Name its format with --format, or give another file."),
    "MT102": Code(
        "steps of several runs in one file", EXIT_DATA, "Split it, or give it a column named run, attempt or rank."
    ),
    "MT103": Code("no such metrics here", EXIT_DATA, "`midwatch metrics show RUN` lists what there is."),
    "MT104": Code("metrics of this run are there already", EXIT_USAGE, "Give another --run-dir, or --replace."),
    "MT105": Code(
        "no place for the index of metrics", EXIT_IO, "Set metrics.index_dir to a folder on a disk of this host."
    ),
    "MT106": Code("metrics cannot be delivered", EXIT_IO, "The message says what the receiver answered."),
    "MT107": Code("the page of metrics cannot be served", EXIT_IO, "Choose another metrics.listen: HOST:PORT."),
    # --- the circuit breaker -------------------------------------------------------------------------------------
    "GD101": Code(
        "the circuit breaker ended the run",
        EXIT_DO_NOT_REQUEUE,
        "Look at the incident (`midwatch breaker show RUN`), decide, then start again.",
    ),
    "GD102": Code(
        "a decision cannot be left for this run",
        EXIT_DATA,
        "`midwatch breaker show RUN` says what it does and what is in force.",
    ),
    "GD103": Code(
        "ranks judge at different places",
        EXIT_CONFIG,
        "Call run.guard on every rank in every step, or on none.",
    ),
    "GD104": Code(
        "lowered learning rates are not in effect",
        EXIT_CONFIG,
        "Track every optimizer (run.track), or multiply its rates by run.lr_factor in the script.",
    ),
    "GD105": Code(
        "a part of the model is not inspected any more",
        EXIT_FAILED,
        "Training goes on. Report it, or switch this part off in [guards.inspect].",
    ),
    # --- alerts --------------------------------------------------------------------------------------------------
    "AL101": Code("an alert was not delivered", EXIT_IO, "`midwatch alerts test` says what each target answers."),
    "AL102": Code("nobody can be alerted", EXIT_CONFIG, "Name a target in [alerts.to], and where its secret is kept."),
    # --- supervision ---------------------------------------------------------------------------------------------
    "SV101": Code("command not found", EXIT_USAGE, "Check the spelling and PATH; it runs without a shell."),
    "SV102": Code("another run is live on this folder", EXIT_BUSY, "Stop it first or use another --run-dir."),
    "SV103": Code("restart budget spent", EXIT_FAILED, "See the incidents: `midwatch ledger show`."),
    "SV104": Code(
        "the same failure came back without progress",
        EXIT_DO_NOT_REQUEUE,
        "Fix the cause named; restarting cannot help.",
    ),
    "SV105": Code(
        "the script fails before its first step", EXIT_DO_NOT_REQUEUE, "Fix the import or argument error shown."
    ),
    "SV106": Code(
        "nodes did not join in time",
        EXIT_FAILED,
        "Check that every node runs the same command and sees the run folder.",
    ),
    "SV107": Code(
        "processes could not be killed", EXIT_FAILED, "They hang in the kernel: take the node out and reboot it."
    ),
    "SV108": Code(
        "resume not proven", EXIT_DATA, "A rank resumed from something else than the others; see the ledger."
    ),
    "SV109": Code("stopped on request", EXIT_REQUEUE, "Start again: it resumes where it stopped."),
    "SV110": Code("no such run or not running", EXIT_DATA, "Check --run-dir."),
    "SV111": Code("nodes disagree about the command", EXIT_CONFIG, "Start every node with the same command line."),
    "SV112": Code(
        "a supervising process keeps dying",
        EXIT_INTERNAL,
        "Read its log in RUN/supervisor; start again when the machine is well.",
    ),
    "SV113": Code(
        "a held run was given up",
        EXIT_REQUEUE,
        "The cause was wide and did not pass in grade.hold_max_s: find it, then start again.",
    ),
    "SV114": Code(
        "no node replaces the lost one",
        EXIT_REQUEUE,
        "Start again with enough nodes, or keep spares: --nnodes MIN:MAX.",
    ),
    "SV115": Code(
        "node unknown",
        EXIT_USAGE,
        "`midwatch status RUN --json` names the nodes of a live run, `midwatch node list RUN` what is held against whom.",
    ),
    "SV116": Code(
        "ended so that the outside launcher starts again",
        EXIT_REQUEUE,
        "Start the job again: it resumes; the message names the culprit and the nodes to leave out.",
    ),
    "SV117": Code(
        "not started by another launcher",
        EXIT_USAGE,
        "With --adopt, start one `midwatch run` a rank by srun, torchrun or the like.",
    ),
    # --- protocol ------------------------------------------------------------------------------------------------
    "PR101": Code("message signature wrong", EXIT_PROTOCOL, "Token and run differ: is this the right run folder?"),
    "PR102": Code(
        "message replayed or out of order", EXIT_PROTOCOL, "Refused; if it recurs, someone repeats your traffic."
    ),
    "PR103": Code("message from an older attempt", EXIT_PROTOCOL, "Refused: the sender outlived its attempt."),
    "PR104": Code("coordinator out of reach", EXIT_PROTOCOL, "Check the network between the nodes; training goes on."),
    # --- triage --------------------------------------------------------------------------------------------------
    "TR101": Code("nothing here that can be judged", EXIT_DATA, "Give a text file with a header, steps and a loss."),
    "TR102": Code(
        "rows of several writers are mixed", EXIT_DATA, "Give it a column named attempt or rank, or one file each."
    ),
    "TR103": Code("facts file cannot be used", EXIT_DATA, "It is one JSON object; the message names the fault."),
}
