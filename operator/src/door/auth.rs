//! Who reports: a token that the API server vouches for, bound to a pod.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest as _, Sha256};
use stoker_api::names::TOKEN_AUDIENCE;
use tokio::sync::Semaphore;

use crate::cache::Key;
use crate::error::{Error, request};
use crate::objects::CachedPod;
use crate::world::World;

/// How long the API server's word is believed.
const BELIEVED: Duration = Duration::from_secs(60);
/// How long a refused token is refused without asking again.
const REFUSED: Duration = Duration::from_secs(5);
/// Tokens remembered; beyond, those that are believed no more go.
const REMEMBERED_MAX: usize = 20_000;
/// Questions to the API server at a time: strangers must not use up all it answers.
const REVIEWS_MAX: usize = 32;
/// The longest token looked at.
const TOKEN_BYTES_MAX: usize = 16 << 10;

const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const POD_UID: &str = "authentication.kubernetes.io/pod-uid";

/// A pod that a token is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub(super) pod: Key,
    pub(super) uid: String,
}

/// Why a caller is turned away.
#[derive(Clone, Debug)]
pub(super) enum Denied {
    /// Its token is none of ours.
    Unknown(String),
    /// Nobody can say.
    Away(String),
}

/// What was found of a token, and when.
type Found = (Result<Caller, String>, Instant);

/// Callers by their tokens' hashes.
pub(super) struct Callers {
    client: Client,
    known: Mutex<HashMap<[u8; 32], Found>>,
    reviews: Semaphore,
}

impl std::fmt::Debug for Callers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callers").finish_non_exhaustive()
    }
}

impl Callers {
    pub(super) fn new(client: Client) -> Self {
        Self { client, known: Mutex::default(), reviews: Semaphore::new(REVIEWS_MAX) }
    }

    /// The pod that a token is bound to.
    pub(super) async fn identify(&self, token: &str) -> Result<Caller, Denied> {
        if token.is_empty() || token.len() > TOKEN_BYTES_MAX {
            return Err(Denied::Unknown("no bearer token".to_owned()));
        }
        let hash: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        if let Some(known) = self.known(&hash) {
            return known.map_err(Denied::Unknown);
        }
        let away = |why: String| Denied::Away(format!("the token cannot be checked: {why}"));
        let _permit = self.reviews.acquire().await.map_err(|it| away(it.to_string()))?;
        if let Some(known) = self.known(&hash) {
            return known.map_err(Denied::Unknown);
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
        let asked = request("review a token", api.create(&parameters, &review)).await;
        let status = asked.map_err(|it| away(it.to_string()))?.status.unwrap_or_default();
        let found = caller(&status);
        self.remember(hash, found.clone());
        found.map_err(Denied::Unknown)
    }

    fn known(&self, hash: &[u8; 32]) -> Option<Result<Caller, String>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let (found, at) = known.get(hash)?;
        let believed = if found.is_ok() { BELIEVED } else { REFUSED };
        (at.elapsed() < believed).then(|| found.clone())
    }

    fn remember(&self, hash: [u8; 32], found: Result<Caller, String>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED_MAX {
            known.retain(|_, it| it.0.is_ok() && it.1.elapsed() < BELIEVED);
        }
        if known.len() < REMEMBERED_MAX {
            known.insert(hash, (found, Instant::now()));
        }
    }

    /// The pod of a caller; `None` if it is gone.
    pub(super) async fn pod(
        &self,
        world: &World,
        caller: &Caller,
    ) -> Result<Option<Arc<CachedPod>>, Error> {
        if let Some(pod) = world.pods.get(&caller.pod).filter(|it| it.seen.uid == caller.uid) {
            return Ok(Some(pod));
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &caller.pod.namespace);
        let doing = format!("read pod {}", caller.pod);
        let found = request(doing, api.get_opt(&caller.pod.name)).await?.map(CachedPod::new);
        Ok(found.filter(|it| it.seen.uid == caller.uid).map(Arc::new))
    }
}

/// The pod that the API server says a token is bound to.
fn caller(status: &TokenReviewStatus) -> Result<Caller, String> {
    if status.authenticated != Some(true) {
        let why = status.error.as_deref().unwrap_or("the API server does not know the token");
        return Err(why.to_owned());
    }
    let audiences = status.audiences.as_deref().unwrap_or_default();
    if !audiences.iter().any(|it| it == TOKEN_AUDIENCE) {
        return Err(format!("the token is not for the audience {TOKEN_AUDIENCE}"));
    }
    let user = status.user.clone().unwrap_or_default();
    let name = user.username.unwrap_or_default();
    let namespace = name.strip_prefix("system:serviceaccount:").and_then(|it| it.split(':').next());
    let extra = user.extra.unwrap_or_default();
    let one = |name: &str| extra.get(name).and_then(|it| it.first()).cloned();
    match (namespace, one(POD_NAME), one(POD_UID)) {
        (Some(namespace), Some(pod), Some(uid)) => {
            Ok(Caller { pod: Key::new(namespace, &pod), uid })
        }
        _ => Err("the token is not bound to a pod".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[track_caller]
    fn check(status: Value, expected: Result<&str, &str>) {
        let status: TokenReviewStatus = serde_json::from_value(status).unwrap();
        let found = caller(&status).map(|it| format!("{} {}", it.pod, it.uid));
        let found = found.as_deref().map_err(String::as_str);
        assert_eq!(found, expected);
    }

    #[test]
    fn only_a_token_for_us_that_is_bound_to_a_pod_counts() {
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
            Err("the token is not bound to a pod"),
        );
        check(
            json!({"authenticated": true, "audiences": ["other"], "user": user(bound.clone())}),
            Err("the token is not for the audience stoker"),
        );
        check(
            json!({"authenticated": true, "audiences": ours,
                "user": {"username": "somebody", "extra": bound}}),
            Err("the token is not bound to a pod"),
        );
        check(json!({"authenticated": false, "error": "expired"}), Err("expired"));
        check(json!({}), Err("the API server does not know the token"));
    }
}
