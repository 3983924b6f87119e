from lightning_ep.cli import main

raise SystemExit(main())
