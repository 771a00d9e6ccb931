package partition

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"

	"holdfast/internal/decode"
)

const (
	// lookWell is the time between looks at a cluster that is as needed,
	// lookIll that at one that is not.
	lookWell = 30 * time.Second
	lookIll  = 5 * time.Second
	// lookTimeout bounds one look: short, since its failure is what tells that
	// the brokers cannot be reached.
	lookTimeout = 5 * time.Second
)

// watchCluster looks whether brokers and topics are there. The client library
// tells neither: it goes on dialing, and it waits for a topic that does not
// exist as it waits for one that is idle.
func (s *session) watchCluster(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if s.lookAtTopics(ctx) && s.member.remaining(time.Now()) > 0 {
			timer.Reset(lookWell)
		} else {
			timer.Reset(lookIll)
		}
	}
}

// lookAtTopics makes one look and tells whether all is as needed.
func (s *session) lookAtTopics(ctx context.Context) bool {
	look, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	topics, err := s.admin.ListTopics(look, s.cfg.topics()...)
	if ctx.Err() != nil {
		return false
	}
	faults := make(map[string]error)
	switch {
	case errors.Is(err, kerr.TopicAuthorizationFailed): // of one of them; which one is not said
		for _, name := range s.cfg.topics() {
			faults[name] = topicDenied(name, err)
		}
		err = nil
	case err != nil:
		// The look ends by its time, which says nothing; the last dial says why.
		if dialed := s.member.dialErr(); dialed != nil {
			err = dialed
		}
		err = s.cfg.explain("reach the brokers "+strings.Join(s.cfg.Brokers, ","), err)
	default:
		for _, name := range s.cfg.topics() {
			if fault := topicFault(topics, name); fault != nil {
				faults[name] = fault
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.brokersErr = err
	if err == nil {
		s.missing = faults // while the brokers are silent, the last look counts
		for name, old := range s.topicErrs {
			if faults[name] == nil && errors.Is(old, kerr.UnknownTopicOrPartition) {
				delete(s.topicErrs, name)
			}
		}
	}
	return err == nil && len(faults) == 0
}

// topicFault says what is wrong with a topic that was looked up, nil for
// nothing.
func topicFault(topics kadm.TopicDetails, name string) error {
	d, ok := topics[name]
	switch {
	case !ok, errors.Is(d.Err, kerr.UnknownTopicOrPartition):
		return &decode.Refusal{
			Reason: decode.ReasonSetup, What: "topic", Where: name, Why: "it does not exist",
			Do: fmt.Sprintf("create it (kafka-topics --create --topic %s), or take it out of KAFKASINK_TOPICS", name),
		}
	case errors.Is(d.Err, kerr.TopicAuthorizationFailed):
		return topicDenied(name, d.Err)
	case d.Err != nil:
		return fmt.Errorf("look up topic %s: %w", name, d.Err)
	}
	return nil
}

func topicDenied(name string, err error) error {
	return &decode.Refusal{
		Reason: decode.ReasonSetup, What: "topic", Where: name, Why: "this user may not describe it",
		Do: fmt.Sprintf("grant it (kafka-acls --add --allow-principal User:… --operation Read --operation Describe --topic %s)", name), Err: err,
	}
}
