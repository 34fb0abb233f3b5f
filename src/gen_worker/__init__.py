"""The worker: the SDK that authors import and the runtime that drives their class."""
