//! Viewers: what one request may see, and how a page that many share knows them.

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use stoker_storage::Storage;

use crate::actions::ActionBackend;
use crate::job::Job;
use crate::rows::MetricsCache;
use crate::sessions::Session;
use crate::site::Site;
use crate::store::Run;
use crate::visible::Visible;

/// Bearer token of a viewer. It is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Takes a token, with or without the word `Bearer`. Returns `None` if a header cannot contain
    /// it.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        let token = match text.get(..6) {
            Some(word) if word.eq_ignore_ascii_case("bearer") => text[6..].trim_start(),
            _ => text,
        };
        let is_valid = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
        is_valid.then(|| Self(token.to_owned()))
    }

    /// Returns the token.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Why a viewer cannot see anything now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The API server does not accept the token (any more).
    Token(String),
    /// The API server cannot be asked.
    Unavailable(String),
}

/// Accepts viewers by their tokens.
pub trait Directory: fmt::Debug + Send + Sync {
    /// Checks a token.
    fn sign_in(&self, token: Token) -> BoxFuture<'_, Result<Arc<dyn Account>, Refusal>>;
}

/// A signed-in viewer. All requests have the viewer's token, and so the viewer's permissions.
pub trait Account: fmt::Debug + Send + Sync {
    /// Name of the user, as the API server knows it.
    fn name(&self) -> &str;

    /// Time at which the token expires, in seconds since 1970; `None` if that is not known.
    fn expires_at(&self) -> Option<i64>;

    /// Returns what the viewer may see. Permissions are at most a minute old.
    fn sight(&self) -> BoxFuture<'_, Result<Sight, Refusal>>;

    /// Adds a namespace to those whose permissions are checked.
    ///
    /// # Errors
    ///
    /// The name is invalid.
    fn add_namespace(&self, name: &str) -> Result<(), String>;

    /// Opens the storage of a run with the Secret that its record names.
    fn storage<'a>(&'a self, run: &'a Run) -> BoxFuture<'a, Result<Arc<Storage>, String>>;

    /// Opens the output directory of a job with the Secret that its record names.
    fn output<'a>(&'a self, job: &'a Job) -> BoxFuture<'a, Result<Arc<Storage>, String>>;

    /// Requests of actions and for slots.
    fn api(&self) -> Arc<dyn ActionBackend>;

    /// Ends every use of the token.
    fn end(&self);
}

/// Records and namespaces that a viewer may see.
#[derive(Clone, Debug)]
pub struct Sight {
    /// The records.
    pub visible: Visible,
    /// Where they come from, such as `Namespace ml`.
    pub place: String,
    /// Whether the viewer may see all namespaces.
    pub is_everywhere: bool,
    /// Checked namespaces, each with what is missing; empty with `is_everywhere`.
    pub namespaces: Vec<(String, Option<String>)>,
}

/// Viewer of a request. Routes reach records, site and permissions only through this.
#[derive(Debug)]
pub(crate) struct Viewer {
    pub(crate) visible: Visible,
    pub(crate) site: Site,
    pub(crate) metrics: Arc<MetricsCache>,
    /// Session with what it may see; `None` for the owner of a private page.
    pub(crate) session: Option<(Arc<Session>, Sight)>,
}

impl Viewer {
    /// Returns whether the viewer has signed in, but may see none of the checked namespaces.
    pub(crate) fn sees_no_namespace(&self) -> bool {
        self.session.as_ref().is_some_and(|(_, sight)| {
            !sight.is_everywhere && sight.namespaces.iter().all(|(_, missing)| missing.is_some())
        })
    }

    /// Returns a visible run, with the storage that this viewer may read.
    pub(crate) async fn run(&self, namespace: &str, name: &str) -> Option<Arc<Run>> {
        let run = self.visible.run(namespace, name)?;
        let Some((session, _)) = &self.session else { return Some(run) };
        let storage = session.account.storage(&run).await;
        Some(Arc::new(run.with_storage(storage)))
    }

    /// Returns a visible job, with the output that this viewer may read.
    pub(crate) async fn job(&self, namespace: &str, name: &str) -> Option<Arc<Job>> {
        let job = self.visible.job(namespace, name)?;
        let Some((session, _)) = &self.session else { return Some(job) };
        let output = session.account.output(&job).await;
        Some(Arc::new(Job { output, ..Job::clone(&job) }))
    }

    /// Returns what the viewer may see now.
    ///
    /// # Errors
    ///
    /// The session has ended, or the permissions cannot be reviewed now.
    pub(crate) async fn visible_now(&self) -> Result<Visible, Refusal> {
        match &self.session {
            None => Ok(self.visible.clone()),
            Some((session, _)) if session.is_over() => {
                Err(Refusal::Token("the session has ended".to_owned()))
            }
            Some((session, _)) => Ok(session.account.sight().await?.visible),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_taken_from_forms_and_headers() {
        let token = |text: &str| Token::new(text).map(|token| token.expose().to_owned());
        assert_eq!(token(" a.b.c\n"), Some("a.b.c".to_owned()));
        assert_eq!(token("Bearer a.b"), Some("a.b".to_owned()));
        assert_eq!(token("bearer  a"), Some("a".to_owned()));
        for text in ["", "  ", "Bearer ", "a b", "a\r\nHost: x", "é"] {
            assert_eq!(token(text), None, "{text:?}");
        }
        assert_eq!(format!("{:?}", Token::new("secret")), "Some(Token(..))");
    }
}
