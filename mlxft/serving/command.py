"""`mlxft serve`: a model and its adapters behind OpenAI's and Anthropic's APIs."""

import ipaddress
import json
import logging
import signal
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxft.config import compose
from mlxft.config.composition import Composed
from mlxft.errors import EXIT_DONE, InputError
from mlxft.models.load import vocabulary_size
from mlxft.models.resolve import resolve

log = logging.getLogger("mlxft")

PROVIDERS = ("pi",)


def main(arguments: list[str]) -> int:
    """Serves until a signal comes and returns the exit code: 128 and its number. `--provider pi`: see `pi`.

    Raises: InputError for a wrong configuration, model or adapter, and an address that is taken.
    """
    overrides, provider = _provider(arguments)
    composed = compose(overrides, command="serve")
    if provider:
        from mlxft.serving.pi import definition

        print(json.dumps(definition(composed), indent=2))
        return EXIT_DONE
    try:
        from mlxft.serving.app import make_app
    except ImportError as error:
        raise InputError(
            f"mlxft serve needs packages that are not installed ({error.name}): pip install -e '.[serve]' "
            "in mlxft's checkout"
        ) from None
    cfg = composed.own.server
    with _listening(cfg.host, cfg.port) as listening:
        served = make_served(composed)
        try:
            app = make_app(served, cfg.api_key, cfg.allow_mount)
            return _serve(app, served, listening, cfg.shutdown_s)
        finally:
            served.engine.stop()


def _provider(arguments: list[str]) -> tuple[list[str], str]:
    """Returns the overrides, and what followed --provider."""
    if "--provider" not in arguments:
        return arguments, ""
    place = arguments.index("--provider")
    name = arguments[place + 1] if place + 1 < len(arguments) else ""
    if name not in PROVIDERS:
        raise InputError(f"--provider {name}: there is {', '.join(PROVIDERS)}")
    return arguments[:place] + arguments[place + 2 :], name


def make_served(composed: Composed) -> Any:
    """Returns the engine, started, with the adapters that a configuration mounts. Raises: InputError."""
    from mlxft.serving.engine import Limits, load_engine
    from mlxft.serving.served import Bounds, Served

    config, cfg = composed.config, composed.own.server
    folder = resolve(config.model.path, config.model.revision)
    for path in [*config.adapter.starts, *cfg.adapters.values()]:
        if not Path(path).expanduser().is_dir():
            raise InputError(f"there is no adapter folder {path}")
    limits = Limits(cfg.max_concurrent, cfg.max_queue, cfg.memory_limit, int(cfg.prompt_cache * 1e9))
    engine = load_engine(
        folder, config.model.dtype, limits, cfg.any_template, config.adapter.any_base
    ).start()
    try:
        default = _mount_all(engine, composed)
    except BaseException:
        engine.stop()
        raise
    name = cfg.name or config.model.path
    bounds = Bounds(int(cfg.max_body * 1e6), cfg.max_messages, cfg.max_choices, cfg.default_tokens)
    return Served(
        engine,
        name,
        vocabulary_size(folder),
        (config.model.path, Path(config.model.path).name),
        bounds,
        default,
        cfg.temperature,
        cfg.thinking,
    )


def _mount_all(engine: Any, composed: Composed) -> str | None:
    """Mounts the configuration's adapters and returns the default one's name."""
    adapter, default = composed.config.adapter, None
    for name, path in composed.own.server.adapters.items():
        engine.mount(name, [path])
    if adapter.starts:
        default = Path(adapter.starts[0]).expanduser().resolve().name
        engine.mount(default, adapter.starts, adapter.init_weights)
    for resident in engine.residents.listed():
        of_all = " (of requests that name none)" if resident.name == default else ""
        log.info("adapter %s%s: %s", resident.name, of_all, ", ".join(resident.folders))
    return default


@contextmanager
def _listening(host: str, port: int):
    """Gives a socket that is bound, before a large model is read. Raises: InputError."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise InputError(
            f"server.host={host} server.port={port}: {error.strerror or error}; "
            "choose another, for example server.port=8081"
        ) from None
    with listening:
        yield listening


def _serve(app: Any, served: Any, listening: socket.socket, shutdown_s: float) -> int:
    import uvicorn

    # uvicorn ends what is still open after its own time; the engine has ended every answer before.
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=int(shutdown_s) + 10,
    )
    server = uvicorn.Server(config)
    stopped_by: list[int] = []

    def stop(signum: int, frame: Any) -> None:
        if stopped_by:  # asked twice: now
            server.force_exit = True
            threading.Thread(target=served.engine.stop, daemon=True).start()
        stopped_by.append(signum)
        server.should_exit = True
        grace = shutdown_s if len(stopped_by) == 1 else 0.0
        threading.Thread(target=served.engine.stop, args=(grace,), daemon=True).start()

    server.capture_signals = lambda: _handled(stop)
    host, port = listening.getsockname()[:2]
    _warn_open(host, app)
    log.info("serving %s on http://%s:%d/v1", served.name, f"[{host}]" if ":" in host else host, port)
    server.run(sockets=[listening])
    if stopped_by:
        log.info("stopped by %s", signal.Signals(stopped_by[0]).name)
    return 128 + stopped_by[0] if stopped_by else EXIT_DONE


@contextmanager
def _handled(handler: Any):
    """Signals go to `handler` within the block."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _warn_open(host: str, app: Any) -> None:
    guarded = any(layer.kwargs.get("api_key") for layer in app.user_middleware)
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback and not guarded:
        log.warning("anyone who can reach %s can use this server; set server.api_key", host)
