package partition

import (
	"net"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// membership knows how long the broker still counts this process as a member
// of the group for certain.
//
// It watches the client's requests: the answer to a heartbeat or SyncGroup
// proves that the coordinator restarted the session's timer no earlier than
// the request was written, so that instant is what counts, not the answer's.
// The answer's error code is not visible here. One that says that the member
// is unknown makes the client call the lost callback, which kills all lanes;
// one that says that the coordinator has moved is followed by finding the new
// one, which gives every member a whole session from when it takes over. The
// margin covers the time that takes.
//
// The sequence it guards against: the process is suspended or cut off; the
// session runs out; another member takes the partition over and sends newer
// rows; this process comes back and sends the older rows it has ready. It is
// no fence (a request may be started just before), but together with the next
// owner's wait of one request lifetime it is one: a request started while
// remaining() > 0 has ended before the next owner's first.
type membership struct {
	session, margin time.Duration
	cfg             *Config
	// renewed is called, on the client's goroutine, when a session that had
	// run out is answered again.
	renewed func()

	mu   sync.Mutex
	last time.Time // zero: never
	dial error     // of the last connection attempt
}

var (
	_ kgo.HookBrokerE2E     = (*membership)(nil)
	_ kgo.HookBrokerConnect = (*membership)(nil)
)

// OnBrokerConnect is called by the client after each attempt to connect.
func (m *membership) OnBrokerConnect(at kgo.BrokerMetadata, _ time.Duration, _ net.Conn, err error) {
	if err != nil {
		err = m.cfg.explainDial(at, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dial = err
}

// dialErr is why the last attempt to connect failed; nil if it did not.
func (m *membership) dialErr() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dial
}

// OnBrokerE2E is called by the client after each exchange with a broker.
func (m *membership) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, e2e kgo.BrokerE2E) {
	switch kmsg.Key(key) {
	case kmsg.Heartbeat, kmsg.SyncGroup, kmsg.ConsumerGroupHeartbeat:
	default:
		return
	}
	if e2e.Err() != nil {
		return
	}
	now := time.Now()
	sent := now.Add(-e2e.DurationE2E())
	m.mu.Lock()
	stale := m.left(now) <= 0
	if sent.After(m.last) {
		m.last = sent
	}
	fresh := m.left(now) > 0
	m.mu.Unlock()
	if stale && fresh {
		m.renewed()
	}
}

// remaining is how long a request may still be started. Zero or less means
// that the session may be gone.
func (m *membership) remaining(now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.left(now)
}

func (m *membership) left(now time.Time) time.Duration {
	if m.last.IsZero() {
		return 0
	}
	return m.session - m.margin - now.Sub(m.last)
}

// contact is when the coordinator was last heard; zero if never.
func (m *membership) contact() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}
