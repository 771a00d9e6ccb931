package partition

import (
	"context"
	"slices"
)

// Topics gives the names of all topics that this user may see, in order, those
// aside that the brokers keep for themselves.
func (a *Admin) Topics(ctx context.Context) ([]string, error) {
	all, err := a.admin.ListTopics(ctx)
	if err != nil {
		return nil, a.cfg.explain("list the topics", err)
	}
	var names []string
	for name, d := range all {
		if d.Err == nil && !d.IsInternal {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}
