// Package ops is what an operator sees of a daemon: the status page, the HTTP
// endpoints /healthz, /livez, /readyz and /metrics, the logger, the command line with
// its verbs, signals and exit codes.
//
// It promises: the address is bound before the daemon connects anywhere, and a
// taken one is an error; no endpoint asks a dependency anything, so each
// answers at once; nothing served changes anything. There is no
// authentication: bind to loopback or a private network.
//
// It moves no data and decides nothing about it. Its callers are cmd/pgsource
// and cmd/kafkasink; the packages that move data are handed the pieces they
// need (a *Health, a *slog.Logger, a prometheus.Registerer).
package ops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

const (
	maxConnections    = 64 // open at once; more wait in the kernel's queue
	maxScrapes        = 4  // of /metrics at once; more get 503
	maxRequestHeader  = 16 << 10
	readHeaderTimeout = 5 * time.Second
	requestTimeout    = 15 * time.Second
	idleTimeout       = 30 * time.Second
	shutdownTimeout   = 3 * time.Second
)

// ServerOptions says what a Server shows.
type ServerOptions struct {
	Daemon   string // for the status page
	Health   *Health
	Gatherer prometheus.Gatherer
	Logger   *slog.Logger
	// Page says what the status page shows beside the checks.
	Page Page
	// History draws the page's charts, Repeats has the failures that go on.
	// Both may be nil: then the page is without them.
	History *History
	Repeats *Repeats
	// Now gives the time; nil = time.Now.
	Now func() time.Time
}

// Server answers on one address with its own routes.
type Server struct {
	listener net.Listener
	http     *http.Server
	logger   *slog.Logger
}

// Listen binds addr (host:port) and answers nobody yet. Call it before
// connecting anywhere, so that a second instance on the same address ends here
// and not after it has taken something over. The Server must be given to Serve
// or Close.
func Listen(ctx context.Context, addr string, opts ServerOptions) (*Server, error) {
	if opts.Health == nil || opts.Gatherer == nil || opts.Logger == nil {
		return nil, errors.New("listen for health and metrics: Health, Gatherer and Logger are required")
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s for health and metrics: %w", addr, err)
	}
	return &Server{
		listener: limitConnections(l, maxConnections),
		http: &http.Server{
			Handler:           handler(opts),
			ReadHeaderTimeout: readHeaderTimeout,
			ReadTimeout:       requestTimeout,
			WriteTimeout:      requestTimeout,
			IdleTimeout:       idleTimeout,
			MaxHeaderBytes:    maxRequestHeader,
			ErrorLog:          slog.NewLogLogger(opts.Logger.Handler(), slog.LevelDebug),
		},
		logger: opts.Logger,
	}, nil
}

// Addr gives the address that was bound, with the port that was chosen for
// port 0.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve answers until ctx ends, then gives running requests a short time to
// end; nil then. Hand it a context that outlives the drain of the daemon: a
// prober must be able to see that it is stopping.
func (s *Server) Serve(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve health and metrics on %s: %w", s.Addr(), err)
	case <-ctx.Done():
	}
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := s.http.Shutdown(limit); err != nil {
		s.logger.LogAttrs(limit, slog.LevelDebug, "requests for health or metrics were cut at the end", slog.Any("err", err))
		_ = s.http.Close() // the requests are lost either way
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve health and metrics on %s: %w", s.Addr(), err)
	}
	return nil
}

// Close gives the address back without having served.
func (s *Server) Close() error {
	if err := s.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close the address for health and metrics: %w", err)
	}
	return nil
}

func handler(opts ServerOptions) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		r := opts.Health.Report()
		answer(w, r.Status == StatusOK || r.Status == StatusDegraded, r)
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		r := opts.Health.Readiness()
		answer(w, r.Ready, r)
	})
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		l := opts.Health.Liveness()
		answer(w, l.Live, l)
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(opts.Gatherer, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(opts.Logger.Handler(), slog.LevelWarn),
		MaxRequestsInFlight: maxScrapes,
		Timeout:             requestTimeout - time.Second,
	}))
	pageHandler(mux, opts)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		mux.ServeHTTP(w, r)
	})
}

func answer(w http.ResponseWriter, ok bool, body any) {
	w.Header().Set("Content-Type", "application/json")
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(body) // the client is gone: nobody to tell
}

// limitedListener lets at most cap(slots) connections be open at once: what
// is beyond waits unaccepted, so that no client can use up the daemon's file
// descriptors.
type limitedListener struct {
	net.Listener
	slots  chan struct{}
	closed chan struct{}
	once   sync.Once
}

func limitConnections(l net.Listener, most int) net.Listener {
	return &limitedListener{Listener: l, slots: make(chan struct{}, most), closed: make(chan struct{})}
}

// Accept waits for a free slot, then for a connection.
func (l *limitedListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err //nolint:wrapcheck // net/http looks at the listener's own errors
	}
	return &limitedConn{Conn: c, release: func() { <-l.slots }}, nil
}

// Close also wakes an Accept that waits for a slot.
func (l *limitedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close() //nolint:wrapcheck // as above
}

type limitedConn struct {
	net.Conn
	once    sync.Once
	release func()
}

// Close frees the slot, once.
func (c *limitedConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(c.release)
	return err //nolint:wrapcheck // as above
}
