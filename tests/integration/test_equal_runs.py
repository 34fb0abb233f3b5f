"""Which equal run may answer a submit, over the real registry: only one whose result still stands."""

import asyncio
import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import msgspec
from service_host import Host, job
from test_service import channel_to, method, submit_request

from gen_worker.trainer.author.code_identity import OUTSIDE_NAME, OutsideCode, OutsideModule
from trn.proto import trainer_pb2 as pb


def test_an_equal_run_answers_only_while_its_result_stands(tmp_path: Path) -> None:
    named, library = tmp_path / "words.txt", tmp_path / "library.py"
    named.write_text("a b c")
    library.write_text("FACTOR = 1")
    config = {**job(run_id="shapes"), "hyperparams": {"words": "words.txt"}}
    request = pb.Submission(config_json=json.dumps(config).encode(), base_dir=str(tmp_path))

    async def main() -> None:
        async with Host(tmp_path / "home") as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")

            async def trained(run_id: str, *notes: str) -> None:
                """It is trained, for that reason, and its result stands then."""
                made = await submit(request)
                assert (made.run.run_id, made.existed) == (run_id, False)
                assert len(made.notes) == len(notes)
                for note, words in zip(made.notes, notes, strict=True):
                    assert words in note
                await host.start(run_id)
                outside = OutsideCode(
                    modules={
                        "library": OutsideModule(
                            file=str(library), digest=f"sha256:{sha256(library.read_bytes()).hexdigest()}"
                        )
                    }
                )
                (host.home.run(run_id).root / OUTSIDE_NAME).write_bytes(msgspec.json.encode(outside))
                if run_id == "shapes":
                    named.touch()  # by the class, while it trains
                await host.end(run_id)
                again = await submit(request)
                assert (again.run.run_id, again.existed) == (run_id, True)
                assert again.notes[0].startswith(f"not trained again: {run_id} has the same")

            await trained("shapes")
            library.write_text("FACTOR = 2")
            await trained(
                "shapes.2", "trained anew: shapes is equal, but code outside its snapshot has changed"
            )
            library.write_text("FACTOR = 1")
            back = await submit(request)
            assert (back.run.run_id, back.existed) == ("shapes", True), "what it trained with is back"
            library.write_text("FACTOR = 2")
            later_ns = (host.registry.get("shapes.2").ended_ms + 60_000) * 1_000_000
            os.utime(named, ns=(later_ns, later_ns))
            made = await submit(request)
            assert (made.run.run_id, made.existed) == ("shapes.3", False)
            assert "files that its hyperparams name have changed since it ended: words.txt" in made.notes[0]

    asyncio.run(main())


def test_a_run_whose_files_were_deleted_does_not_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")
            await submit(submit_request(run_id="mine"))
            await host.start("mine")
            await host.end("mine")
            assert (await submit(submit_request(run_id="mine"))).existed
            shutil.rmtree(host.home.run("mine").root)
            again = await submit(submit_request(run_id="mine"))
            assert (again.run.run_id, again.existed) == ("mine.2", False)
            assert again.notes[0].startswith("trained anew: mine is equal, but its final checkpoint is gone")

    asyncio.run(main())


def test_what_an_equal_run_does_not_take_over_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")
            await submit(submit_request(run_id="mine", tags={"team": "a"}))
            request = submit_request(run_id="mine", tags={"team": "b"})
            request.priority = 5
            again = await submit(request)
            assert again.existed
            assert again.notes[1] == (
                "mine keeps what it was submitted with: priority 0, not 5; tags team=a, not team=b"
            )

    asyncio.run(main())


def test_secret_variables_are_compared_by_name_and_that_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")

            async def asked(**secret_env: str) -> pb.SubmitRunResponse:
                request = submit_request(run_id="mine")
                request.secret_env.update(secret_env)
                return await submit(request)

            await asked(HF_TOKEN="one")
            again = await asked(HF_TOKEN="two")
            assert (again.run.run_id, again.existed) == ("mine", True)
            assert again.notes[0].endswith("The values of secret variables are not compared: HF_TOKEN")
            assert (await asked()).run.run_id == "mine.2"
            assert (await asked(HF_TOKEN="one", OTHER_TOKEN="x")).run.run_id == "mine.3"

    asyncio.run(main())


def test_a_new_run_is_submitted_without_a_query_beside_its_transaction(tmp_path: Path) -> None:
    async def main() -> None:
        async with Host(tmp_path) as host, channel_to(host) as channel:
            submit = method(channel, "SubmitRun")
            asked: list[str] = []
            host.registry._read.set_trace_callback(asked.append)
            made = await submit(submit_request(name="first"))
            assert not made.existed
            assert asked == []
            again = await submit(submit_request(name="first"))
            assert (again.run.run_id, again.existed) == (made.run.run_id, True)
            assert len(asked) == 1, "whether the result of the equal run stands"

    asyncio.run(main())
