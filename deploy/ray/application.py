"""The application for Ray Serve: a deployment of frontends (the ingress) in front of a deployment of engines."""

import re
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application

from penstock.deploy.ray.autoscaling import WaitingTokens
from penstock.deploy.ray.engine import STOP_SECONDS, Engine
from penstock.deploy.ray.frontend import Frontend
from penstock.deploy.ray.launcher import gpus_per_rank
from penstock.deploy.ray.settings import ModelPlan, read_args

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters that are not allowed in names of deployments."""

_MAX_REQUESTS = 10_000
"""Requests at a time for each frontend. Serve's limit must be higher than what the engines' queues accept."""


def app(args: dict[str, Any]) -> Application:
    """`serve run penstock.deploy.ray:app NAME=VALUE …`

    Args:
        args: options of `penstock serve`, and `Settings`; see `settings.py`.

    Raises:
        ConfigError: if they cannot work; the message is one sentence.
    """
    plans = read_args(args)
    longest = max(plan.config.frontend.shutdown_timeout for plan in plans)
    ingress = serve.deployment(
        serve.ingress()(Frontend),
        name="Frontend",
        num_replicas=plans[0].settings.num_frontends,
        max_ongoing_requests=_MAX_REQUESTS,
        graceful_shutdown_timeout_s=longest + STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config={"enable_access_log": False},  # the frontend has a line for each request
    )
    names = ["Engine"] if len(plans) == 1 else [f"Engine-{_NO_NAME.sub('-', plan.name)}" for plan in plans]
    models = [(msgspec.json.encode(plan.config), _engines(name, plan)) for name, plan in zip(names, plans, strict=True)]
    return ingress.bind(*models)


def _engines(name: str, plan: ModelPlan) -> Application:
    config, settings = plan.config, plan.settings
    # Ray's launcher requests the resources of ranks; otherwise ranks are processes beside the replica's.
    num_gpus = 0.0 if config.parallel.launcher == "ray" else gpus_per_rank(config) * config.parallel.num_ranks
    deployment = serve.deployment(
        Engine,
        name=name,
        autoscaling_config={
            "min_replicas": settings.min_engines,
            "max_replicas": settings.most_engines,
            "metrics_interval_s": 1.0,
            "look_back_period_s": 3.0,
            "upscale_delay_s": settings.upscale_delay,
            "downscale_delay_s": settings.downscale_delay,
            "policy": {
                "policy_function": WaitingTokens,
                "policy_kwargs": {"target_waiting_tokens": settings.target_waiting_tokens},
            },
        },
        ray_actor_options={"num_cpus": settings.cpus_per_engine, "num_gpus": num_gpus},
        graceful_shutdown_timeout_s=config.frontend.shutdown_timeout + STOP_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=5.0,
        logging_config={"enable_access_log": False},  # frontends ask all the time
    )
    return deployment.bind(msgspec.json.encode(config))
