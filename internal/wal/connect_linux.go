package wal

import (
	"syscall"
	"time"
)

// tcpUserTimeout is TCP_USER_TIMEOUT of linux/tcp.h, which package syscall
// lacks.
const tcpUserTimeout = 18

// setUserTimeout bounds how long sent bytes may stay unacknowledged by the
// peer's kernel: keepalive probes are not sent while any are.
func setUserTimeout(fd uintptr, d time.Duration) error {
	return syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(d.Milliseconds()))
}
