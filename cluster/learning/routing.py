"""A plan of drafts, and a stream's request, tenant and domain -> the version that drafts for it.

A pure function of the two: whoever holds the same plan gives the same answer, whichever attempt at a request asks.
"""

from __future__ import annotations

import hashlib

from paceline.cluster.types import DraftPlan


def version_for(plan: DraftPlan, request_id: str, tenant: str, domain: str) -> str:
    """That of the first route that fits, else the live one; or the canary, for its share of such requests."""
    found, version = "", plan.live
    for tag, routed in plan.routes:
        kind, _, name = tag.partition(":")
        if name and name == {"tenant": tenant, "domain": domain}.get(kind):
            found, version = tag, routed
            break
    if plan.canary and plan.canary_tag == found and place(request_id) < plan.canary_share:
        return plan.canary
    return version


def place(request_id: str) -> float:
    """Where a request stands in [0, 1), by what its client called it: all attempts at it stand at one place.

    Gateways add "@place" to a request's id, and attempts "/epoch".
    """
    name, at, _ = request_id.partition("@")
    if not at:
        head, slash, epoch = name.rpartition("/")
        name = head if slash and epoch.isdigit() else name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, person=b"canary").digest()
    return int.from_bytes(digest, "big") / 2.0**64


def versions_needed(plan: DraftPlan) -> list[str]:
    """What somebody is to be drafted for by, the live version first; each once."""
    wanted = [plan.live, plan.canary, *(version for _, version in plan.routes)]
    return list(dict.fromkeys(version for version in wanted if version))
