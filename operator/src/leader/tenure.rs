//! How long trials have been stopping before this replica led, by the clock of the leader before.
//!
//! A replica that has just started has not observed how long a trial has been stopping, and does
//! not trust the time of the request, which another clock wrote. The lease contains two times of
//! the clock of its last holder: when that leader acquired it, and when it last renewed it. Their
//! difference does not depend on the clock of this replica.

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use stoker_api::time::Timestamp;

use crate::context::{Context, now};
use crate::objects::CachedTrial;

/// Time for which the last holder of the lease led, by its own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tenure {
    acquired: Timestamp,
    renewed: Timestamp,
    /// When this replica read the lease, by its own clock.
    read_at: Timestamp,
}

impl Tenure {
    /// Reads the tenure of a lease's last holder; `None` if the lease lacks a time.
    pub(super) fn of(lease: &LeaseSpec) -> Option<Self> {
        let seconds = |time: &Option<MicroTime>| Some(Timestamp(time.as_ref()?.0.as_second()));
        let (acquired, renewed) = (seconds(&lease.acquire_time)?, seconds(&lease.renew_time)?);
        Some(Self { acquired, renewed, read_at: now() })
    }

    /// Returns when a trial that this leader or an earlier one paused or stopped has certainly been
    /// stopping, by the clock of this replica. `desired_since` is the recorded time of the request.
    ///
    /// If this leader made the request, `desired_since` is of its clock. Otherwise the trial was
    /// stopping during the whole tenure; a time of another clock that happens to be within the
    /// tenure only makes the result later.
    fn stopping_since(&self, desired_since: Timestamp) -> Timestamp {
        let observed = self.renewed.seconds_since(desired_since.max(self.acquired));
        Timestamp(self.read_at.0.saturating_sub_unsigned(observed))
    }
}

/// Marks trials that have been stopping since before this replica observed them. Must be called
/// after this replica acquired the lease and before it writes specs, so that earlier leaders have
/// made all requests in the cache.
pub(super) fn adopt(context: &Context, tenure: Tenure) {
    for trial in context.trials.all() {
        let spec = &trial.record.spec;
        let Some(desired_since) = spec.desired_since.filter(|_| !spec.desired_state.is_run())
        else {
            continue;
        };
        let since = tenure.stopping_since(desired_since);
        if since < trial.desired_state_seen_at && trial.unreadable.is_none() {
            let mut trial = CachedTrial::new(trial.trial.clone());
            trial.desired_state_seen_at = since;
            context.trials.put(trial);
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::Client;
    use serde_json::json;

    use super::*;
    use crate::cache::Key;
    use crate::fixture;

    #[test]
    fn the_previous_tenure_shows_how_long_a_trial_stops() {
        // The clock of the previous leader was 1,000 s behind.
        let tenure =
            Tenure { acquired: Timestamp(100), renewed: Timestamp(400), read_at: Timestamp(1402) };
        let check = |desired_since: i64, stopped_seconds: i64| {
            let since = tenure.stopping_since(Timestamp(desired_since));
            assert_eq!(since, Timestamp(1402 - stopped_seconds), "{desired_since}");
        };
        check(350, 50);
        check(400, 0);
        // Earlier leaders, of which one had a clock that was ahead.
        check(90, 300);
        check(-9000, 300);
        check(9000, 0);
    }

    #[test]
    fn leases_without_times_have_no_tenure() {
        let lease = |value| serde_json::from_value::<LeaseSpec>(value).unwrap();
        let time = "1970-01-01T00:01:40.900000Z";
        let tenure = Tenure::of(&lease(json!({ "acquireTime": time, "renewTime": time })));
        assert_eq!(tenure.map(|tenure| tenure.renewed), Some(Timestamp(100)));
        assert_eq!(Tenure::of(&lease(json!({ "acquireTime": time }))), None);
        assert_eq!(Tenure::of(&lease(json!({ "renewTime": time }))), None);
    }

    #[tokio::test]
    async fn stopping_trials_keep_their_time_after_a_restart() {
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let context = fixture::context(Client::try_from(config).unwrap());
        for (name, state) in [("t-0", "pause"), ("t-1", "run"), ("t-2", "stop")] {
            let trial = json!({
                "apiVersion": "stoker.dev/v1alpha1", "kind": "Trial",
                "metadata": {
                    "name": name, "namespace": "ns", "uid": name, "resourceVersion": "7",
                },
                "spec": {
                    "experiment": "t", "index": 0, "requestId": "r", "seed": 1,
                    "hyperparameters": {}, "unit": "batches", "units": 8, "wanted": state,
                    "wantedSince": "1970-01-01T00:05:00Z",
                },
            });
            context.trials.put(CachedTrial::new(serde_json::from_value(trial).unwrap()));
        }
        let seen_at =
            |name: &str| context.trials.get(&Key::new("ns", name)).unwrap().desired_state_seen_at;
        let before = seen_at("t-1");
        let read_at = Timestamp(before.0 - 60);
        adopt(&context, Tenure { acquired: Timestamp(100), renewed: Timestamp(400), read_at });
        assert_eq!(
            ["t-0", "t-1", "t-2"].map(seen_at),
            [Timestamp(read_at.0 - 100), before, Timestamp(read_at.0 - 100),]
        );
        // Later observations and a later tenure change nothing.
        let again = context.trials.get(&Key::new("ns", "t-0")).unwrap();
        context.trials.put(CachedTrial::new(again.trial.clone()));
        adopt(&context, Tenure { acquired: read_at, renewed: read_at, read_at: before });
        assert_eq!(seen_at("t-0"), Timestamp(read_at.0 - 100));
    }
}
