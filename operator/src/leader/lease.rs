//! The lease: acquired, renewed and released by one replica.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};

use super::tenure::Tenure;
use crate::context::Context;
use crate::error::{Error, request};

/// The lease as last observed.
#[derive(Debug)]
struct ObservedLease {
    version: Option<String>,
    since: Instant,
}

/// A replica that takes part in the election.
#[derive(Debug)]
pub(super) struct Candidate {
    context: Arc<Context>,
    observed: Option<ObservedLease>,
    tenure: Option<Tenure>,
    duration: Duration,
}

impl Candidate {
    pub(super) fn new(context: Arc<Context>, duration: Duration) -> Self {
        Self { context, observed: None, tenure: None, duration }
    }

    /// Returns the tenure that the latest renewal found in the lease. If this replica has just
    /// acquired the lease, it is of the leader before.
    pub(super) fn tenure(&self) -> Option<Tenure> {
        self.tenure
    }

    fn api(&self) -> Api<Lease> {
        Api::namespaced(self.context.client.clone(), &self.context.options.namespace)
    }

    /// Acquires or renews the lease. Returns the number of leader changes if this replica holds it.
    pub(super) async fn acquire(&mut self) -> Result<Option<i32>, Error> {
        let name = self.context.options.lease_name.clone();
        let api = self.api();
        self.tenure = None;
        let current = request("read the lease", api.get_opt(&name)).await?;
        let Some(lease) = current else {
            let metadata = ObjectMeta { name: Some(name), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(self.spec(None, 0)) };
            let parameters = PostParams::default();
            return match request("create the lease", api.create(&parameters, &lease)).await {
                Ok(_) => Ok(Some(0)),
                Err(Error::Exists { .. }) => Ok(None),
                Err(other) => Err(other),
            };
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let is_ours = holder == self.context.options.identity;
        self.tenure = Tenure::of(&spec);
        let version = lease.metadata.resource_version.clone();
        if self.observed.as_ref().is_none_or(|lease| lease.version != version) {
            self.observed = Some(ObservedLease { version, since: Instant::now() });
        }
        let is_over =
            self.observed.as_ref().is_some_and(|lease| lease.since.elapsed() >= self.duration);
        if !is_ours && !holder.is_empty() && !is_over {
            return Ok(None);
        }
        let transitions = spec.lease_transitions.unwrap_or(0) + i32::from(!is_ours);
        let acquired = spec.acquire_time.filter(|_| is_ours);
        let spec = Some(self.spec(acquired, transitions));
        let lease = Lease { spec, ..lease };
        let parameters = PostParams::default();
        match request("renew the lease", api.replace(&name, &parameters, &lease)).await {
            Ok(_) => Ok(Some(transitions)),
            Err(Error::Conflict { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    }

    fn spec(&self, acquired: Option<MicroTime>, transitions: i32) -> LeaseSpec {
        let now = MicroTime(jiff::Timestamp::now());
        LeaseSpec {
            acquire_time: acquired.or_else(|| Some(now.clone())),
            holder_identity: Some(self.context.options.identity.clone()),
            lease_duration_seconds: i32::try_from(self.duration.as_secs()).ok(),
            lease_transitions: Some(transitions),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }
    }

    /// Releases the lease, so that another replica need not wait until it expires.
    pub(super) async fn release(&self) {
        let name = &self.context.options.lease_name;
        let api = self.api();
        let released = async {
            let mut lease = request("read the lease", api.get(name)).await?;
            if let Some(spec) = lease.spec.as_mut() {
                let is_ours = spec.holder_identity.as_ref() == Some(&self.context.options.identity);
                if is_ours {
                    spec.holder_identity = Some(String::new());
                }
            }
            let parameters = PostParams::default();
            request("release the lease", api.replace(name, &parameters, &lease)).await
        };
        if let Err(error) = released.await {
            tracing::warn!(%error, "lease not released; another replica waits until it expires");
        }
    }
}
