"""What an operator asks for -> done, or refused with the reason; see `views.Action` for what there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import structlog

from paceline.cluster.errors import PacelineError
from paceline.cluster.learning import writes
from paceline.cluster.learning.rollout import Refused, Rollout
from paceline.cluster.learning.views import Action, Result

if TYPE_CHECKING:
    from paceline.cluster.learning.loop import LearningLoop

log = structlog.get_logger(__name__)


class Operator:
    """Carries out actions on the event loop's thread; only `delete` waits for storage."""

    def __init__(self, loop: LearningLoop) -> None:
        self._loop = loop

    async def act(self, action: Action, subject: str, actor: str, arguments: Mapping[str, Any]) -> Result:
        if action not in get_args(Action):
            return Result(False, f"action {action!r}: expected one of {', '.join(get_args(Action))}")
        rollout = self._loop.rollout
        if rollout is None:
            return Result(False, "the state of before is still being read from the registry")
        try:
            if action == "delete":
                message = await self._delete(subject, actor)
            else:
                message = self._do(rollout, action, subject, actor, arguments)
        except Refused as error:
            return Result(False, str(error))
        except PacelineError as error:
            return Result(False, str(error))
        log.info("operator", action=action, subject=subject, actor=actor)
        return Result(True, message)

    def _do(self, rollout: Rollout, action: Action, subject: str, actor: str, arguments: Mapping[str, Any]) -> str:  # fmt: skip
        loop, now = self._loop, self._loop.clock()
        match action:
            case "pause" | "resume":
                loop.is_paused = action == "pause"
                loop.save()
                return "no run and no canary begins by itself" if loop.is_paused else "learning goes on"
            case "train":
                return self._train(subject, actor, now)
            case "forget":
                return self._forget(subject, f"stopped by {actor}", now)
            case "canary" | "promote":
                return self._serve(rollout, action, subject, actor, bool(arguments.get("force")), now)
            case "pin":
                loop.apply(rollout.pin(subject, actor=actor))
                return f"{rollout.lane(subject).live} stays live until it is unpinned"
            case "unpin":
                loop.apply(rollout.unpin(subject, actor=actor))
                return f"{rollout.lane(subject).live} may be replaced again"
            case "roll_back":
                reason = str(arguments.get("reason") or "") or f"rolled back by {actor}"
                (change,) = rollout.roll_back(subject, now, reason=reason, actor=actor)
                loop.apply([change])
                return f"{change.version} was taken back; {change.other} drafts"
            case "revoke":
                reason = str(arguments.get("reason") or "") or f"revoked by {actor}"
                return self.revoke(subject, reason, actor)
        raise AssertionError(action)

    def _train(self, tag: str, actor: str, now: float) -> str:
        loop = self._loop
        if loop.config.trainer.replicas == 0:
            raise Refused("trainer.replicas=0: there is no trainer")
        if loop.runs.is_busy():
            run = loop.runs.current
            raise Refused(f"{run.run_id if run else 'a run'} is on: wait for it, or forget it")
        run = loop.cycle.train(tag, f"asked for by {actor}", actor, now)
        waits = f"; it waits: {loop.guard.reason}" if loop.guard.level in ("pause", "evict") else ""
        return f"{run.run_id} begins{waits}"

    def _forget(self, run_id: str, reason: str, now: float) -> str:
        loop = self._loop
        run = loop.runs.stop(run_id, now, reason)
        if run is None:
            raise Refused(f"run {run_id!r} is not on")
        writes.run(loop.keeper, run)
        loop.save()
        loop.plan_changed()
        return f"{run_id} ends, nothing of it is published"

    def _serve(self, rollout: Rollout, action: Literal["canary", "promote"], subject: str, actor: str, force: bool, now: float) -> str:  # fmt: skip
        loop = self._loop
        version, _, tag = subject.partition("@")
        known = loop.versions.get(version)
        if known is None:
            raise Refused(f"version {version!r} is not known for this target")
        if known.state == "revoked":
            raise Refused(f"{version} was revoked: it never serves again")
        if known.state in ("rejected", "rolled_back") and not force:
            raise Refused(f"{version} is {known.state}: {known.reason}; force serves it all the same")
        if version != loop.base and not known.url:
            raise Refused(
                f"{version}: its weights were removed from storage (learning.rollout.kept); train again"
            )
        if not tag and known.tag:
            raise Refused(f"{version} was trained for {known.tag} only: it can serve that, not everybody")
        if action == "canary" and loop.learning.rollout.canary_share == 0:
            raise Refused("learning.rollout.canary_share=0: there is no canary; promote it instead")
        goal: Literal["canary", "live"] = "canary" if action == "canary" else "live"
        lane = rollout.lane(tag)
        if action == "promote" and lane.stage == "canary" and lane.candidate == version:
            lane.stage = "preparing"  # all draft workers hold it already
        loop.apply(rollout.offer(version, tag, now, actor=actor, goal=goal))
        loop.advance()
        if action == "canary":
            return f"{version} gets {loop.learning.rollout.canary_share:.0%} of streams as soon as all draft workers hold it"
        is_live = rollout.lane(tag).live == version
        return (
            f"{version} is live" if is_live else f"{version} goes live as soon as all draft workers hold it"
        )

    def revoke(self, version: str, reason: str, actor: str) -> str:
        """A version never serves again."""
        loop = self._loop
        assert loop.rollout is not None
        if version == loop.base:
            raise Refused(f"{version} is the configuration's draft: it stays")
        if version not in loop.versions:
            raise Refused(f"version {version!r} is not known for this target")
        for run in loop.runs.open():
            if version in {ref.version for ref in run.refs}:  # what comes of it would be of no use
                self._forget(run.run_id, f"{version} was revoked: {reason}", loop.clock())
        changes = loop.rollout.drop(version, loop.base, loop.clock(), reason=reason, actor=actor)
        loop.apply(changes)
        loop.note(version, "revoked", reason)
        writes.move(loop.keeper, version, "revoked", reason, actor)
        loop.replan()
        served = [change for change in changes if change.kind == "dropped"]
        return f"{version} is revoked" + (f"; {served[0].other} drafts instead" if served else "")

    async def _delete(self, what: str, actor: str) -> str:
        kind, _, name = what.partition(":")
        if kind not in ("tenant", "request") or not name:
            raise Refused(f"delete {what!r}: expected tenant:NAME or request:ID")
        try:
            deletion = await self._loop.storing.deleting.delete(what, actor)
        except PacelineError as error:
            raise Refused(f"{error}; what is not deleted yet is tried again each minute") from error
        message = f"{deletion.num_requests} streams of {what} were deleted"
        if not deletion.versions:
            return message
        names = ", ".join(deletion.versions)
        if not self._loop.learning.revoke_deleted:
            return f"{message}; {names} had learned from them (learning.revoke_deleted=false: they serve on)"
        return f"{message}; {names} had learned from them and were revoked"
