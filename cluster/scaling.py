"""What replicas of a role say of their load -> how many of them there should be: Ray Serve's autoscaling policy.

Serve pickles this module by value and calls it in its controller, which bounds the answer and acts on it only when it
has stood for a while. So this imports nothing of ours.
"""

from __future__ import annotations

from typing import Any

LOAD = "load"
"""The name under which a replica reports: 1 is as much as it can do, 2 as much again that waits."""


def by_load(context: Any) -> tuple[float, dict[str, Any]]:
    """As many replicas as would each be as busy as wanted with all of the load.

    Args:
        context: Serve's AutoscalingContext: `aggregated_metrics` has each replica's mean load of late, and
            `config.target_ongoing_requests` is the load that each should have.

    Returns:
        (replicas, not rounded and within no bounds; state to keep, which there is none of)
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    wanted = sum(loads.values()) / context.config.target_ongoing_requests
    if any(replica not in loads for replica in context.running_replicas):
        # Silent: just started, or the controller is new. What is not known is no reason to have fewer.
        wanted = max(wanted, context.target_num_replicas)
    return wanted, {}
