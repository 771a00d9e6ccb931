package feldera

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-json-experiment/json"

	"holdfast/internal/decode"
)

// Config says where the pipeline is and how it is spoken to.
type Config struct {
	// URL is the manager's address, or with Pipeline "" that of one pipeline
	// process. It carries no user, query or fragment.
	URL string
	// Pipeline is the name of the pipeline at the manager; "" = URL is a bare
	// pipeline process.
	Pipeline string
	// APIKey gives the key, with its "apikey:" prefix. It is asked once, and
	// again after each 401, so that a rotated file is picked up. nil = none.
	APIKey func() (string, error)
	// CAFile holds certificates in PEM that are trusted besides the system's.
	CAFile string
	// RequestTimeout ends one request. Zero means 25 s: below the manager's 30 s.
	RequestTimeout time.Duration
	// RequestLifetime is how long an abandoned request can still be applied.
	// Zero means 30 s, the manager's bound. A bare process gives no bound.
	RequestLifetime time.Duration
	// CheckpointInterval is the least time between two checkpoints that a
	// [Durability] asks for. Zero means 5 s.
	CheckpointInterval time.Duration
	// Shared tells that other processes may write to the same tables at the
	// same time. Then each answered request is followed by a look at the
	// statistics: see [Writer.Send].
	Shared bool
	// Logger gets one line per change of state. nil discards.
	Logger *slog.Logger
	// Observe gets each finished request; both labels are of closed sets:
	// the endpoints of this package, and "ok" or a [Class]. May be nil.
	Observe func(endpoint, outcome string, d time.Duration)
	// UnansweredLimit is how many requests in a row with the same rows
	// [Writer.SendRows] makes that get no answer from a pipeline which runs and
	// which answers an empty request to the same table; 0 is any number.
	UnansweredLimit int
	// OnRetry gets each failed attempt that will be repeated. It is called on
	// the goroutine that waits and must not block. May be nil.
	OnRetry func(Retry)
	// BackoffInitial and BackoffMax bound the wait between attempts. Zero
	// means 200 ms and 15 s.
	BackoffInitial, BackoffMax time.Duration
}

// Endpoint names, as they appear in errors and in metrics: a closed set.
const (
	epIngress          = "ingress"
	epCompletion       = "completion_status"
	epStats            = "stats"
	epDescribe         = "describe"
	epStart            = "start_transaction"
	epCommit           = "commit_transaction"
	epCheckpoint       = "checkpoint"
	epCheckpointStatus = "checkpoint_status"
	epQuery            = "query"
)

// Bounds on what is read of an answer, in bytes.
const (
	maxSmallBody = 1 << 20
	// maxLargeBody is the manager's own limit for answers that it passes on.
	maxLargeBody = 50 << 20
	maxKeyBytes  = 16 << 10
)

// Client is one pipeline. It is safe for concurrent use.
type Client struct {
	cfg  Config
	base string // without a slash at the end
	http *http.Client

	keyMu   sync.Mutex
	key     string // "" = not asked yet
	keyRead bool

	incMu sync.Mutex
	// expected is the incarnation that tokens must be of; "" = none seen yet.
	expected string
	// heard is when the newest request was made that it has answered, in Unix
	// nanoseconds; when the answer was read says little, since who has stood still
	// reads old ones. One that is expected anew has answered none.
	heard atomic.Int64

	writersMu sync.Mutex
	writers   map[string]*Writer // by canonical table spelling

	seq atomic.Uint64 // orders the tokens of one writer

	uncut uncut
}

// New checks cfg and makes a client. It connects to nothing.
func New(cfg Config) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil {
		// The parser's error quotes the address, which may carry a password.
		return nil, errors.New("feldera address: it cannot be parsed; expected http(s)://host:port")
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "":
		return nil, errors.New("feldera address: expected http(s)://host:port")
	case u.User != nil:
		return nil, errors.New("feldera address: it carries a user or password; give the API key instead")
	case u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("feldera address: it carries a query or fragment; expected http(s)://host:port")
	}
	if cfg.RequestTimeout < 0 || cfg.RequestLifetime < 0 || cfg.CheckpointInterval < 0 || cfg.BackoffInitial < 0 || cfg.BackoffMax < 0 {
		return nil, errors.New("feldera client: a duration is negative")
	}
	cfg.RequestTimeout = orDefault(cfg.RequestTimeout, 25*time.Second)
	cfg.RequestLifetime = orDefault(cfg.RequestLifetime, 30*time.Second)
	cfg.CheckpointInterval = orDefault(cfg.CheckpointInterval, 5*time.Second)
	cfg.BackoffInitial = orDefault(cfg.BackoffInitial, 200*time.Millisecond)
	cfg.BackoffMax = max(orDefault(cfg.BackoffMax, 15*time.Second), cfg.BackoffInitial)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	roots, err := trusted(cfg.CAFile)
	if err != nil {
		return nil, err
	}
	base := strings.TrimRight(u.String(), "/")
	if cfg.Pipeline != "" {
		base += "/v0/pipelines/" + url.PathEscape(cfg.Pipeline)
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 15 * time.Second}
	return &Client{
		cfg: cfg, base: base, writers: make(map[string]*Writer),
		http: &http.Client{
			Transport: &http.Transport{
				Proxy:               http.ProxyFromEnvironment,
				DialContext:         dialer.DialContext,
				TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
				TLSHandshakeTimeout: 10 * time.Second,
				// Below the pipeline's keep-alive of 30 s, so that a request
				// seldom meets a connection that the server is just closing.
				IdleConnTimeout:        20 * time.Second,
				MaxIdleConns:           64,
				MaxIdleConnsPerHost:    64,
				MaxConnsPerHost:        256,
				DisableCompression:     true, // a compressed answer would get round the bounds on its size
				MaxResponseHeaderBytes: 64 << 10,
				WriteBufferSize:        64 << 10,
			},
			// Following a redirect would repeat a POST as a GET, or hand the
			// key to another host.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

func orDefault(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}

// trusted gives the system's certificates and those of file.
func trusted(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil //nolint:nilnil // nil is the system's pool to crypto/tls
	}
	pem, err := os.ReadFile(file) //nolint:gosec // the operator names the file in the daemon's own configuration
	if err != nil {
		return nil, fmt.Errorf("feldera CA file: %w", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("feldera CA file %s: no certificate in it; expected PEM", file)
	}
	return pool, nil
}

// CloseIdle closes the connections that no request uses. Call it when the
// client is done with.
func (c *Client) CloseIdle() { c.http.CloseIdleConnections() }

// where names the destination in refusals.
func (c *Client) where() string {
	if c.cfg.Pipeline != "" {
		return fmt.Sprintf("pipeline %q", c.cfg.Pipeline)
	}
	return "pipeline process " + c.base
}

// viaManager is true where the manager passes requests on, and may therefore
// send a POST twice.
func (c *Client) viaManager() bool { return c.cfg.Pipeline != "" }

// call is one request.
type call struct {
	endpoint string
	method   string
	path     string // below the base, with its query
	body     []byte // nil = none
	mutates  bool
	limit    int64         // of the answer's body
	timeout  time.Duration // 0 = Config.RequestTimeout
}

// roundTrip sends one request and gives the body of a 2xx answer. Every other
// ending is an *Error. A 401 is answered once with the key read anew: nothing
// was applied then, so that the repetition is safe.
func (c *Client) roundTrip(ctx context.Context, cl call) ([]byte, error) {
	start := time.Now()
	body, err := c.attempt(ctx, cl)
	var e *Error
	if errors.As(err, &e) && e.Status == http.StatusUnauthorized && c.cfg.APIKey != nil {
		c.forgetKey()
		body, err = c.attempt(ctx, cl)
	}
	c.observe(cl.endpoint, err, time.Since(start))
	return body, err
}

func (c *Client) observe(endpoint string, err error, d time.Duration) {
	if c.cfg.Observe == nil {
		return
	}
	outcome := "ok"
	if err != nil {
		outcome = Classify(err).String()
	}
	c.cfg.Observe(endpoint, outcome, d)
}

func (c *Client) attempt(ctx context.Context, cl call) ([]byte, error) {
	timeout := cl.timeout
	if timeout == 0 {
		timeout = c.cfg.RequestTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout,
		fmt.Errorf("no complete answer within %s: %w", timeout, context.DeadlineExceeded))
	defer cancel()
	resp, err := c.open(ctx, cl)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := readBounded(resp.Body, cl.limit)
	if err != nil {
		return nil, c.answerError(ctx, cl, resp, body, err)
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return nil, c.answerError(ctx, cl, resp, body, nil)
	}
	return body, nil
}

// open sends the request and gives the answer with its body unread. Closing
// that body also takes cl.body back: Close returns only when nothing reads it
// any more. An error leaves nothing to close.
func (c *Client) open(ctx context.Context, cl call) (*http.Response, error) {
	fail := func(sent bool, err error) error {
		return &Error{Endpoint: cl.endpoint, Mutates: cl.mutates, Sent: sent, Err: err}
	}
	key, err := c.apiKey()
	if err != nil {
		return nil, fail(false, err)
	}
	// The transport tells when it has a connection. Before that, no byte can
	// have left; after it, nothing is known. No finer line is safe to draw.
	var connected atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(httptrace.GotConnInfo) { connected.Store(true) },
	})
	req, err := http.NewRequestWithContext(ctx, cl.method, c.base+cl.path, http.NoBody)
	if err != nil {
		return nil, fail(false, errors.New("the address cannot be used in a request"))
	}
	lent := &lender{body: cl.body}
	if cl.body != nil {
		req.Body = lent.reader()
		// With it the transport may repeat a request of which nothing had been
		// written when an idle connection turned out to be closed.
		req.GetBody = func() (io.ReadCloser, error) { return lent.reader(), nil }
		req.ContentLength = int64(len(cl.body))
		req.Header.Set("Content-Type", "application/json")
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		lent.takeBack()
		return nil, fail(connected.Load(), transportCause(ctx, err))
	}
	resp.Body = &answerBody{ReadCloser: resp.Body, lent: lent}
	return resp, nil
}

// answerBody is an answer's body. While it is open, the transport may still be
// reading the request's.
type answerBody struct {
	io.ReadCloser
	lent *lender
}

// Close ends the answer and takes the request's body back.
func (b *answerBody) Close() error {
	err := b.ReadCloser.Close()
	b.lent.takeBack()
	return err
}

// transportCause strips the address off a transport's error and puts the
// reason of an ended context in place of the bare "deadline exceeded".
func transportCause(ctx context.Context, err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// answerError describes an answer that is not the promised one. readErr is
// what stopped the reading of its body.
func (c *Client) answerError(ctx context.Context, cl call, resp *http.Response, body []byte, readErr error) *Error {
	e := &Error{
		Endpoint: cl.endpoint, Status: resp.StatusCode, Mutates: cl.mutates, Sent: true,
		RetryAfter: retryAfter(resp.Header.Get("Retry-After")),
	}
	if readErr != nil {
		e.Err = fmt.Errorf("read the answer: %w", transportCause(ctx, readErr))
	}
	if resp.StatusCode > 299 {
		e.decodeError(body, cl.body, c.redact)
	}
	return e
}

// badAnswer is the error for a 2xx answer whose body is not what the contract
// says.
func (c *Client) badAnswer(cl call, body []byte, err error) *Error {
	return &Error{
		Endpoint: cl.endpoint, Status: http.StatusOK, Mutates: cl.mutates, Sent: true,
		Err: fmt.Errorf("the answer is not the promised JSON (%s), it begins %q", c.excerpt([]byte(err.Error()), maxMessage), c.excerpt(body, 80)),
	}
}

// excerpt gives the beginning of what a server wrote, without secrets: they
// are taken out before the cut, which could leave half of one.
func (c *Client) excerpt(b []byte, limit int) string {
	return clip(c.redact(string(b[:min(len(b), limit+maxKeyBytes)])), limit)
}

// getJSON reads a GET's answer into out.
func (c *Client) getJSON(ctx context.Context, cl call, out any) error {
	cl.method = http.MethodGet
	body, err := c.roundTrip(ctx, cl)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, out); err != nil {
		return c.badAnswer(cl, body, err)
	}
	return nil
}

// errTooLarge ends the reading of an answer above its bound.
var errTooLarge = errors.New("the answer is larger than the bound")

// readBounded reads at most limit bytes. On an error it gives what it read.
func readBounded(r io.Reader, limit int64) ([]byte, error) {
	var b bytes.Buffer
	n, err := b.ReadFrom(io.LimitReader(r, limit+1))
	if err != nil {
		return b.Bytes(), err
	}
	if n > limit {
		return b.Bytes()[:limit], fmt.Errorf("%w of %d bytes", errTooLarge, limit)
	}
	return b.Bytes(), nil
}

// retryAfter reads the header's form in seconds; the form as a date is not
// used by the servers, and is read as no wish.
func retryAfter(h string) time.Duration {
	n, err := strconv.ParseUint(strings.TrimSpace(h), 10, 16)
	if err != nil {
		return 0
	}
	return time.Duration(n) * time.Second
}

func (c *Client) apiKey() (string, error) {
	if c.cfg.APIKey == nil {
		return "", nil
	}
	c.keyMu.Lock()
	defer c.keyMu.Unlock()
	if c.keyRead {
		return c.key, nil
	}
	key, err := c.cfg.APIKey()
	if err != nil {
		return "", fmt.Errorf("read the API key: %w", err)
	}
	key = strings.TrimSpace(key)
	if len(key) > maxKeyBytes || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", &decode.Refusal{
			Reason: decode.ReasonSetup, What: "API key", Where: c.where(),
			Why: "it has blanks, control or non-ASCII characters, or is too long", Expected: "apikey: and 128 letters and digits",
			Do: "correct the key's file or variable",
		}
	}
	c.key, c.keyRead = key, true
	return key, nil
}

func (c *Client) forgetKey() {
	c.keyMu.Lock()
	defer c.keyMu.Unlock()
	c.key, c.keyRead = "", false
}

// redact takes the key out of a text that a server wrote.
func (c *Client) redact(s string) string {
	c.keyMu.Lock()
	defer c.keyMu.Unlock()
	if c.key == "" {
		return s
	}
	s = strings.ReplaceAll(s, c.key, "[redacted]")
	if bare := strings.TrimPrefix(c.key, "apikey:"); bare != "" {
		s = strings.ReplaceAll(s, bare, "[redacted]")
	}
	return s
}

// lender lends a caller's bytes to the transport and can take them back.
//
// The transport may go on reading a request's body after the answer is in: the
// server answers early, the client returns, the caller fills the buffer with
// the next rows, and the tail of the old request goes out with them. After
// takeBack no Read touches the bytes.
type lender struct {
	mu   sync.Mutex
	body []byte
	back bool
}

func (l *lender) reader() *lentReader { return &lentReader{from: l} }

func (l *lender) takeBack() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.back, l.body = true, nil
}

// lentReader is one pass over the lent bytes.
type lentReader struct {
	from *lender
	off  int
}

// Read gives the next bytes, or an error once they were taken back.
func (r *lentReader) Read(p []byte) (int, error) {
	r.from.mu.Lock()
	defer r.from.mu.Unlock()
	if r.from.back {
		return 0, io.ErrClosedPipe
	}
	if r.off == len(r.from.body) {
		return 0, io.EOF
	}
	n := copy(p, r.from.body[r.off:])
	r.off += n
	return n, nil
}

// Close does nothing: the bytes are the caller's.
func (*lentReader) Close() error { return nil }
