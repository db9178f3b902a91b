//! Authentication of reports: bearer tokens that the API server reviews, each bound to a pod.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest as _, Sha256};
use stoker_api::names::TOKEN_AUDIENCE;
use tokio::time::timeout;

use super::review_permits::ReviewPermits;
use crate::cache::Key;
use crate::context::Context;
use crate::error::{Error, request};
use crate::objects::CachedPod;

/// Lifetime of a cached successful review.
const ACCEPTED_LIFETIME: Duration = Duration::from_secs(60);
/// Lifetime of a cached rejection.
const REJECTED_LIFETIME: Duration = Duration::from_secs(5);
/// Maximum number of cached tokens. At this size, entries other than recent successes are dropped.
const CACHED_REVIEWS_MAX: usize = 20_000;
/// Longest wait for a permit to review a token.
const PERMIT_WAIT_MAX: Duration = Duration::from_secs(5);
/// Longest review, so that an unresponsive API server does not hold permits.
const REVIEW_MAX: Duration = Duration::from_secs(5);
/// Longest accepted token.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// Complete error of the API server for a token that none of its authenticators accepts. If an
/// authenticator itself fails, the text contains its error as well.
const INVALID_TOKEN: &str = "invalid bearer token";

const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// Pod that a token is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) pod: Key,
    pub(super) uid: String,
}

/// Why a caller is rejected. Never a reason to fence: signing keys rotate, and reviews fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AuthError {
    /// The API server does not accept the token, or the token is not meant for reports.
    Unauthenticated(String),
    /// The token or the caller's object cannot be checked at the moment.
    Unavailable(String),
}

/// Pod of a token or the reason of its rejection, with the time of the review.
type CachedReview = (Result<Caller, String>, Instant);

/// Reviewed callers by token hash.
pub(super) struct Authenticator {
    client: Client,
    reviews: Mutex<HashMap<[u8; 32], CachedReview>>,
    permits: ReviewPermits,
}

impl std::fmt::Debug for Authenticator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authenticator").finish_non_exhaustive()
    }
}

impl Authenticator {
    pub(super) fn new(client: Client) -> Self {
        Self { client, reviews: Mutex::default(), permits: ReviewPermits::default() }
    }

    /// Returns the pod that a token is bound to. A review counts against the permits of
    /// `namespace`.
    pub(super) async fn identify(&self, token: &str, namespace: &str) -> Result<Caller, AuthError> {
        if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
            return Err(AuthError::Unauthenticated("no bearer token".to_owned()));
        }
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(cached) = self.cached_review(&hash) {
            return cached.map_err(AuthError::Unauthenticated);
        }
        let unavailable =
            |why: String| AuthError::Unavailable(format!("the token cannot be checked: {why}"));
        let permit = timeout(PERMIT_WAIT_MAX, self.permits.acquire(namespace)).await;
        let _permit =
            permit.map_err(|_| unavailable("too many tokens are being reviewed".to_owned()))?;
        if let Some(cached) = self.cached_review(&hash) {
            return cached.map_err(AuthError::Unauthenticated);
        }
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: token.to_owned(),
                audiences: Some(vec![TOKEN_AUDIENCE.to_owned()]),
            },
            ..TokenReview::default()
        };
        let api: Api<TokenReview> = Api::all(self.client.clone());
        let parameters = PostParams::default();
        let review = request("review a token", api.create(&parameters, &review));
        let no_response = |_| unavailable(format!("no response within {} s", REVIEW_MAX.as_secs()));
        let reviewed = timeout(REVIEW_MAX, review).await.map_err(no_response)?;
        let status =
            reviewed.map_err(|error| unavailable(error.to_string()))?.status.unwrap_or_default();
        let result = caller(&status);
        match &result {
            Ok(caller) => self.cache_review(hash, Ok(caller.clone())),
            Err(AuthError::Unauthenticated(why)) => self.cache_review(hash, Err(why.clone())),
            // Do not cache: the next review may succeed.
            Err(AuthError::Unavailable(_)) => {}
        }
        result
    }

    fn cached_review(&self, hash: &[u8; 32]) -> Option<Result<Caller, String>> {
        let reviews = self.reviews.lock().unwrap_or_else(PoisonError::into_inner);
        let (result, at) = reviews.get(hash)?;
        let lifetime = if result.is_ok() { ACCEPTED_LIFETIME } else { REJECTED_LIFETIME };
        (at.elapsed() < lifetime).then(|| result.clone())
    }

    fn cache_review(&self, hash: [u8; 32], result: Result<Caller, String>) {
        let mut reviews = self.reviews.lock().unwrap_or_else(PoisonError::into_inner);
        if reviews.len() >= CACHED_REVIEWS_MAX {
            reviews.retain(|_, (result, at)| result.is_ok() && at.elapsed() < ACCEPTED_LIFETIME);
        }
        if reviews.len() < CACHED_REVIEWS_MAX {
            reviews.insert(hash, (result, Instant::now()));
        }
    }

    /// Returns the pod of a caller; `None` if it no longer exists.
    pub(super) async fn pod(
        &self,
        context: &Context,
        caller: &Caller,
    ) -> Result<Option<Arc<CachedPod>>, Error> {
        if let Some(pod) =
            context.pods.get(&caller.pod).filter(|pod| pod.observed.uid == caller.uid)
        {
            return Ok(Some(pod));
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &caller.pod.namespace);
        let operation = format!("read pod {}", caller.pod);
        let pod = request(operation, api.get_opt(&caller.pod.name)).await?.map(CachedPod::new);
        Ok(pod.filter(|pod| pod.observed.uid == caller.uid).map(Arc::new))
    }
}

/// Returns the pod that a token is bound to, according to its review.
///
/// By the contract of the API, `status.error` means that the token could not be checked, for
/// example while signing keys rotate.
fn caller(status: &TokenReviewStatus) -> Result<Caller, AuthError> {
    let unauthenticated = |why: &str| Err(AuthError::Unauthenticated(why.to_owned()));
    if status.authenticated != Some(true) {
        return match status.error.as_deref().filter(|error| !error.is_empty()) {
            Some(INVALID_TOKEN) => unauthenticated(INVALID_TOKEN),
            Some(error) => {
                Err(AuthError::Unavailable(format!("the token cannot be checked: {error}")))
            }
            None => unauthenticated("the API server does not accept the token"),
        };
    }
    let audiences = status.audiences.as_deref().unwrap_or_default();
    if !audiences.iter().any(|audience| audience == TOKEN_AUDIENCE) {
        return unauthenticated(&format!("the token is not for the audience {TOKEN_AUDIENCE}"));
    }
    let user = status.user.clone().unwrap_or_default();
    let name = user.username.unwrap_or_default();
    let namespace = name.strip_prefix("system:serviceaccount:");
    let namespace = namespace.and_then(|name| name.split(':').next());
    let extra = user.extra.unwrap_or_default();
    let one = |name: &str| extra.get(name).and_then(|values| values.first()).cloned();
    match (namespace, one(POD_NAME), one(POD_UID)) {
        (Some(namespace), Some(pod), Some(uid)) => {
            Ok(Caller { pod: Key::new(namespace, &pod), uid })
        }
        _ => unauthenticated("the token is not bound to a pod"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(status: Value, expected: Result<&str, AuthError>) {
        let status: TokenReviewStatus = serde_json::from_value(status).unwrap();
        let result = caller(&status).map(|caller| format!("{} {}", caller.pod, caller.uid));
        assert_eq!(result, expected.map(str::to_owned));
    }

    fn unauthenticated(why: &str) -> Result<&str, AuthError> {
        Err(AuthError::Unauthenticated(why.to_owned()))
    }

    fn unavailable(error: &str) -> Result<&'static str, AuthError> {
        Err(AuthError::Unavailable(format!("the token cannot be checked: {error}")))
    }

    #[test]
    fn token_needs_our_audience_and_a_pod() {
        let user =
            |extra: Value| json!({"username": "system:serviceaccount:ml:default", "extra": extra});
        let bound = json!({ POD_NAME: ["t-0-a0-r0"], POD_UID: ["u"] });
        let ours = json!(["stoker"]);
        check(
            json!({"authenticated": true, "audiences": ours, "user": user(bound.clone())}),
            Ok("ml/t-0-a0-r0 u"),
        );
        check(
            json!({"authenticated": true, "audiences": ours, "user": user(json!({}))}),
            unauthenticated("the token is not bound to a pod"),
        );
        check(
            json!({"authenticated": true, "audiences": ours,
                "user": user(json!({ POD_NAME: ["t-0-a0-r0"] }))}),
            unauthenticated("the token is not bound to a pod"),
        );
        check(
            json!({"authenticated": true, "audiences": ["other"], "user": user(bound.clone())}),
            unauthenticated("the token is not for the audience stoker"),
        );
        check(
            json!({"authenticated": true, "user": user(bound.clone())}),
            unauthenticated("the token is not for the audience stoker"),
        );
        check(
            json!({"authenticated": true, "audiences": ours,
                "user": {"username": "somebody", "extra": bound}}),
            unauthenticated("the token is not bound to a pod"),
        );
    }

    #[test]
    fn failed_review_is_not_a_refusal() {
        check(json!({"authenticated": false, "error": "no key"}), unavailable("no key"));
        check(json!({"error": "no key"}), unavailable("no key"));
        let failed = "[invalid bearer token, the key is not known yet]";
        check(json!({"authenticated": false, "error": failed}), unavailable(failed));
        check(json!({"error": "invalid bearer token"}), unauthenticated("invalid bearer token"));
        let refused = || unauthenticated("the API server does not accept the token");
        check(json!({"authenticated": false}), refused());
        check(json!({"authenticated": false, "error": ""}), refused());
        check(json!({}), refused());
    }
}
