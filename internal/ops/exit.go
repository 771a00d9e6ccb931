package ops

import (
	"context"
	"errors"

	"holdfast/internal/decode"
)

// The exit codes, by sysexits where it has one. A service manager should not
// restart a daemon that ended with ExitUsage, ExitRefused or ExitConfig.
const (
	ExitOK          = 0  // a clean stop by signal, or the verb did its work
	ExitUnexpected  = 1  // none of the others
	ExitUsage       = 64 // the command line is wrong
	ExitRefused     = 65 // reached, and something is wrong there: a person has to act
	ExitUnavailable = 69 // something that is needed cannot be reached
	ExitBroken      = 70 // an invariant of the program does not hold
	ExitConfig      = 78 // the configuration is wrong
)

// coded is an error that knows which code the process ends with.
// config.Faults is one.
type coded interface {
	error
	ExitCode() int
}

type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func (e *exitError) ExitCode() int { return e.code }

// WithExitCode gives err the code that the process is to end with, whatever is
// inside it. A nil err is for a verb that has said everything already: nothing
// more is printed.
func WithExitCode(code int, err error) error { return &exitError{code: code, err: err} }

// loggedError is an error that the log has said already.
type loggedError struct{ error }

func (e *loggedError) Unwrap() error { return e.error }

// ExitCode gives the code for the error that ended a verb: the one it carries,
// else ExitRefused for a decode.Refusal anywhere inside, else ExitOK for nil
// and ErrStopping, else ExitUnexpected.
func ExitCode(err error) int {
	if err == nil {
		return ExitOK
	}
	if c, ok := errors.AsType[coded](err); ok {
		return c.ExitCode()
	}
	if _, ok := errors.AsType[*decode.Refusal](err); ok {
		return ExitRefused
	}
	if errors.Is(err, ErrStopping) {
		return ExitOK
	}
	return ExitUnexpected
}

// AfterStop tells the error of a requested stop from all others: it gives nil
// when ctx ended by ErrStopping and err says no more than that a context
// ended, perhaps joined with what was being retried then. A refusal, or an
// error with its own exit code, is never hidden by a stop.
func AfterStop(ctx context.Context, err error) error {
	if err == nil || !errors.Is(context.Cause(ctx), ErrStopping) {
		return err
	}
	if code := ExitCode(err); code != ExitUnexpected {
		if code == ExitOK {
			return nil
		}
		return err
	}
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
