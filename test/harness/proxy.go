package harness

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// Direction is one of the two ways through a [Proxy].
type Direction int

// The directions: Up is from the client to the server, Down is from the server
// to the client.
const (
	Up Direction = iota
	Down
)

// Proxy forwards TCP connections from an own address of 127.0.0.1 to a server,
// and does on request what networks do: lose a connection, refuse one, stop
// moving bytes while everything looks connected, or break off after so many
// bytes. All methods are safe for concurrent use.
type Proxy struct {
	target  string
	port    int
	release func()
	bytes   [2]atomic.Int64
	total   atomic.Int64 // connections accepted
	wg      sync.WaitGroup

	mu      sync.Mutex
	ln      net.Listener // nil while refusing
	conns   map[*proxied]struct{}
	stalled [2]bool
	flow    chan struct{} // closed and replaced when stalled changes
	budget  [2]int64      // bytes until everything is cut; below zero = no limit
	tap     func() [2]func([]byte)
	closed  bool
}

type proxied struct {
	client, server net.Conn
	taps           [2]func([]byte) // nil = nobody listens
	done           chan struct{}
	once           sync.Once
	frozen         bool // guarded by the proxy's mu
}

// StartProxy starts a proxy to target, a host:port. The caller must Close it.
func StartProxy(target string) (*Proxy, error) {
	p := &Proxy{target: target, conns: map[*proxied]struct{}{}, flow: make(chan struct{}), budget: [2]int64{-1, -1}}
	var err error
	if p.port, p.release, err = ReservePort(); err != nil {
		return nil, err
	}
	if err := p.Accept(); err != nil {
		p.release()
		return nil, err
	}
	return p, nil
}

// NeedProxy is [StartProxy] for tests: it fails the test when the proxy does not
// start and closes it at the end.
func NeedProxy(tb testing.TB, target string) *Proxy {
	tb.Helper()
	p, err := StartProxy(target)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(p.Close)
	return p
}

// SetTarget changes where new connections are passed on to.
func (p *Proxy) SetTarget(target string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.target = target
}

// Addr gives the host:port that clients use. It never changes.
func (p *Proxy) Addr() string { return loopback(p.port) }

// Bytes gives how many bytes were forwarded in a direction.
func (p *Proxy) Bytes(d Direction) int64 { return p.bytes[d].Load() }

// Connections gives how many connections were accepted in all.
func (p *Proxy) Connections() int64 { return p.total.Load() }

// Accept listens again after [Proxy.Refuse].
func (p *Proxy) Accept() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != nil || p.closed {
		return nil
	}
	ln, err := net.Listen("tcp", p.Addr())
	if err != nil {
		return fmt.Errorf("listen for the proxy to %s: %w", p.target, err)
	}
	p.ln = ln
	p.wg.Go(func() { p.serve(ln) })
	return nil
}

// Refuse closes the listener, so that new connections are refused by the
// kernel. Those that are open go on; see [Proxy.Cut].
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != nil {
		_ = p.ln.Close()
		p.ln = nil
	}
}

// Cut resets every open connection on both sides. New ones are accepted.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutLocked()
}

func (p *Proxy) cutLocked() {
	for c := range p.conns {
		c.reset()
	}
}

// CutAfter resets every connection when n more bytes have been forwarded in a
// direction: after the n-th byte, and not one later. CutAfter(Down, 0) lets
// requests through and loses their answers.
func (p *Proxy) CutAfter(d Direction, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.budget[d] = n
}

// Stall stops reading in the given directions, both if none is given. Open and
// new connections stay open and nothing moves, until [Proxy.Resume].
func (p *Proxy) Stall(ds ...Direction) { p.setStalled(true, ds) }

// Freeze lets the connections that are open now move nothing any more, for good,
// and their ends look connected, as behind a router that has forgotten them. New
// ones work.
func (p *Proxy) Freeze() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.frozen = true
	}
	close(p.flow) // who waits for the end of a stall looks again
	p.flow = make(chan struct{})
}

// Resume ends [Proxy.Stall].
func (p *Proxy) Resume(ds ...Direction) { p.setStalled(false, ds) }

func (p *Proxy) setStalled(stalled bool, ds []Direction) {
	if len(ds) == 0 {
		ds = []Direction{Up, Down}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range ds {
		p.stalled[d] = stalled
	}
	close(p.flow)
	p.flow = make(chan struct{})
}

// Tap listens to every connection that is made from now on: tap is called for
// each, and gives what is called with its bytes, by Direction, before they are
// passed on. The two may be called at the same time.
func (p *Proxy) Tap(tap func() [2]func([]byte)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tap = tap
}

// Close cuts everything, stops listening and waits for its goroutines.
func (p *Proxy) Close() {
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		if p.ln != nil {
			_ = p.ln.Close()
			p.ln = nil
		}
		p.cutLocked()
		p.release()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func (p *Proxy) serve(ln net.Listener) {
	for {
		client, err := ln.Accept()
		if err != nil {
			return // Refuse or Close
		}
		p.total.Add(1)
		p.wg.Go(func() { p.forward(client) })
	}
}

func (p *Proxy) forward(client net.Conn) {
	p.mu.Lock()
	target := p.target
	p.mu.Unlock()
	server, err := net.Dial("tcp", target)
	if err != nil {
		_ = client.Close()
		return
	}
	c := &proxied{client: client, server: server, done: make(chan struct{})}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		c.reset()
		return
	}
	p.conns[c] = struct{}{}
	if p.tap != nil {
		c.taps = p.tap()
	}
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.pump(c, Up, client, server) })
	both.Go(func() { p.pump(c, Down, server, client) })
	both.Wait()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
	c.close()
}

// pump moves bytes in one direction until an end. An orderly end is passed on as
// one (half close), so that HTTP and Postgres see what they would see directly.
func (p *Proxy) pump(c *proxied, d Direction, from, to net.Conn) {
	buf := make([]byte, 32<<10)
	for p.flows(c, d) {
		n, err := from.Read(buf)
		// Read may have waited while Stall came: what it got then is held, an end too.
		if !p.flows(c, d) {
			return
		}
		if n > 0 {
			n, cut := p.take(d, n)
			if c.taps[d] != nil {
				c.taps[d](buf[:n])
			}
			if _, err := to.Write(buf[:n]); err != nil {
				c.reset()
				return
			}
			p.bytes[d].Add(int64(n))
			if cut {
				p.Cut()
				return
			}
		}
		if errors.Is(err, io.EOF) {
			if tcp, ok := to.(*net.TCPConn); ok {
				_ = tcp.CloseWrite()
			}
			return
		}
		if err != nil {
			c.reset()
			return
		}
	}
}

// flows waits until the direction is not stalled; it is false when the
// connection has ended first.
func (p *Proxy) flows(c *proxied, d Direction) bool {
	for {
		p.mu.Lock()
		stalled, flow := p.stalled[d] || c.frozen, p.flow
		p.mu.Unlock()
		if !stalled {
			return true
		}
		select {
		case <-flow:
		case <-c.done:
			return false
		}
	}
}

// take gives how many of n bytes may pass, and whether all must be cut after
// them. A limit that was reached is gone.
func (p *Proxy) take(d Direction, n int) (allowed int, cut bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch left := p.budget[d]; {
	case left < 0:
		return n, false
	case left > int64(n):
		p.budget[d] = left - int64(n)
		return n, false
	default:
		p.budget[d] = -1
		return int(left), true
	}
}

// reset closes both sides so that their peers see a reset and not an end.
func (c *proxied) reset() {
	for _, conn := range []net.Conn{c.client, c.server} {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
	}
	c.close()
}

func (c *proxied) close() {
	c.once.Do(func() {
		close(c.done)
		_ = c.client.Close()
		_ = c.server.Close()
	})
}
