"""Submit from a program without an event loop. A worker runs beside it: `flowfabric worker sync_client:app`."""

import flowfabric as ff

app = ff.App()


@app.task
def divide(dividend: int, divisor: int) -> float:  # the worker runs a synchronous function in a thread
    return dividend / divisor


def main() -> None:
    with ff.Client(app) as client:
        print("result:", client.submit(divide, 7, 2).result(timeout=30))

        runs = client.submit_many(divide, [(number, 4) for number in range(1, 4)], priority=10)
        print("results:", [run.result(timeout=30) for run in runs])

        failing = client.submit(divide, 1, 0, tags={"example.of": "failure"})
        try:
            failing.result(timeout=30)
        except ff.TaskFailed as failure:
            print("failed:", failure.error_type, "-", failure.message)

        try:
            client.submit(divide, "7", 2)
        except ff.InvalidInput as problem:
            print("refused:", problem)  # before anything was stored


if __name__ == "__main__":
    main()
