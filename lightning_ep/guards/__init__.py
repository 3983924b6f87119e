"""Guards against what makes a distributed job wait forever; one file a guard, called from `GuardedStrategy`'s hooks.

attempt.py     torchrun starts all ranks again
handshake.py   ranks were started with different code, options or models
loaders.py     ranks have different numbers of batches
serving.py     ranks without a batch take part in the others' exchanges
control.py     one rank wants to stop, got a signal, skips an epoch, or its clock says validate
watch.py       a rank raised, died, was stopped or hangs (board.py, peers.py, failure.py, progress.py)
launcher.py    Lightning's launcher kills ranks that are about to say why they end
agreement.py   how hosts agree, beside what the GPUs exchange
"""
