package harness_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/test/harness"
)

// parentVar turns the test program into a parent whose death is the test.
const parentVar = "HARNESS_TEST_PARENT"

func TestMain(m *testing.M) {
	if program := os.Getenv(parentVar); program != "" {
		beParent(program)
		return
	}
	goleak.VerifyTestMain(m)
}

// beParent starts a daemon, tells its process id, and waits to be killed.
func beParent(program string) {
	d, err := harness.StartDaemon(harness.DaemonOptions{Program: program, ListenVar: "SAMPLE_LISTEN"})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(d.Pid())
	<-d.Done()
}

func TestChildDiesWithItsParent(t *testing.T) {
	program, err := harness.Build(t.Context(), "./test/harness/testdata/daemon", harness.BuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.Command(os.Args[0])
	parent.Env = append(os.Environ(), parentVar+"="+program)
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatalf("the parent printed %q: %v", line, err)
	}
	if err := syscall.Kill(child, 0); err != nil {
		t.Fatalf("the child %d does not run: %v", child, err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // it was killed: an error is what is expected
	harness.Await(t, 10*time.Second, "the end of the child", func(context.Context) (any, bool) {
		// A dead child that nobody has waited for yet still has its id.
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child))
		return string(stat), err != nil || strings.Contains(string(stat), ") Z ")
	})
}
