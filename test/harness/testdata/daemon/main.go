// Command daemon is what the harness's own test builds and runs: it serves the
// pages of a daemon, and says when it starts and ends.
package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "version" {
		fmt.Println("daemon of the harness's test")
		os.Exit(64)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	fmt.Println("starting with", os.Getenv("SAMPLE_WORD"), os.Getenv("SECRET_OF_THE_CALLER"))
	mux := http.NewServeMux()
	for _, path := range []string{"/healthz", "/readyz"} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"status":"ok"}`) })
	}
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "# TYPE sample_rows_total counter\nsample_rows_total{table=\"orders\"} 42\n")
	})
	server := &http.Server{Addr: os.Getenv("SAMPLE_LISTEN"), Handler: mux}
	go func() {
		if err := server.ListenAndServe(); err != http.ErrServerClosed {
			fmt.Println(err)
			os.Exit(1)
		}
	}()
	<-ctx.Done()
	_ = server.Close()
	fmt.Println("ending")
}
