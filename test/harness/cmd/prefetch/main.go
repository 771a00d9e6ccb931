// Command prefetch fetches and makes what the integration tests need and keeps
// it in the cache of package harness. test/setup.sh runs it; it is quick when
// everything is there.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"holdfast/test/harness"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := harness.Prefetch(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "prefetch:", err)
		os.Exit(1)
	}
}
