"""Operator, tenant and request -> whether a request may be kept for training, and who said no.

All three must agree. The operator's word is `learning.enabled`, the tenant's stands with its API key, the request's is
its `store` field: `"store": false` always wins.
"""

from __future__ import annotations

from typing import Literal, get_args

from paceline.cluster.keys import CaptureRule, Key
from paceline.cluster.learning.config import LearningConfig

Decision = Literal["kept", "operator", "tenant", "request"]
"""kept, or the first of the three that did not agree."""
DECISIONS: tuple[Decision, ...] = get_args(Decision)

LOCAL_TENANT = "local"
"""Whose requests those are for which no key was asked."""


def decide(is_enabled: bool, rule: CaptureRule, store: bool | None) -> Decision:
    """May this request be kept? `store` None is a request that says nothing.

    >>> decide(True, "asked", None), decide(True, "asked", True), decide(True, "default", False)
    ('tenant', 'kept', 'request')
    """
    if not is_enabled:
        return "operator"
    if store is False:
        return "request"
    if rule == "default" or (rule == "asked" and store):
        return "kept"
    return "tenant"


def tenant_of(key: Key | None, config: LearningConfig) -> tuple[str, CaptureRule]:
    """(tenant, its rule) of who sent a request; None sent it without a key, where none is asked for."""
    if key is None:
        return LOCAL_TENANT, config.capture.local_consent
    return key.owner, key.capture


def who_is_kept(config: LearningConfig, *, needs_keys: bool) -> str:
    """One sentence for the operator: whose requests are kept and for how long."""
    hours = f"for {config.capture.ttl_h:g} h"
    if needs_keys:
        return (
            f"requests of API keys made with --capture asked or default, less those with store=false, {hours}"
        )
    return {
        "never": "none: learning.capture.local_consent=never",
        "asked": f"requests with store=true, {hours}",
        "default": f"all requests but those with store=false, {hours}",
    }[config.capture.local_consent]
