//! Sessions of a page that many viewers share. Tokens are only in memory, and only in accounts.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use stoker_storage::hash::{hex, sha256_hex};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::actions::ActionAccess;
use crate::security::is_equal;
use crate::text;
use crate::viewer::{Account, Directory, Refusal, Token};

/// Time after the last request of a browser at which its session ends.
const IDLE_MAX: Duration = Duration::from_secs(8 * 3600);
/// Same for a proxy, which sends the token with each request.
const IDLE_MAX_OF_PROXY: Duration = Duration::from_secs(10 * 60);
/// Maximum number of sessions.
const SESSIONS_MAX: usize = 2_000;
/// Maximum number of sessions of one user. Another one ends the session that is idle longest.
const SESSIONS_OF_USER_MAX: usize = 20;
/// Maximum number of tokens that are checked at the same time. Each costs the API server a request.
/// Others wait: a limit that refuses would let anyone keep all viewers from signing in.
const CHECKS_MAX: usize = 16;
/// Maximum time for which a token waits for its check. An API server that does not answer would
/// otherwise let requests pile up.
const CHECK_WAIT_MAX: Duration = Duration::from_secs(10);
/// Bytes of session IDs and form tokens.
const SECRET_BYTES: usize = 32;

/// Way in which viewers sign in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignIn {
    /// Each viewer enters a token in a form. A cookie names the session.
    Form,
    /// An authenticating proxy sends the header `Authorization: Bearer TOKEN` with each request.
    Header,
}

/// A page that many viewers share.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Accepts the viewers.
    pub directory: Arc<dyn Directory>,
    /// Way in which they sign in.
    pub sign_in: SignIn,
    /// Names, without ports, that requests may use for this server, beside those of the loopback
    /// interface.
    pub hosts: Vec<String>,
    /// Whether pages have buttons that act on the cluster.
    pub allows_actions: bool,
}

/// Session of a viewer.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) account: Arc<dyn Account>,
    /// Requests of actions, with the token that forms contain.
    pub(crate) actions: Arc<ActionAccess>,
    used: Mutex<Instant>,
    has_ended: AtomicBool,
}

impl Session {
    fn new(account: Arc<dyn Account>, allows_actions: bool, form_token: String) -> Self {
        let actions = ActionAccess::new(account.api(), allows_actions, form_token);
        Self {
            account,
            actions: Arc::new(actions),
            used: Mutex::new(Instant::now()),
            has_ended: AtomicBool::new(false),
        }
    }

    /// Returns whether the session has ended, or the token has expired.
    pub(crate) fn is_over(&self) -> bool {
        let is_expired = self.account.expires_at().is_some_and(|at| text::now().0 >= at);
        is_expired || self.has_ended.load(Ordering::Acquire)
    }

    fn idle(&self) -> Duration {
        lock(&self.used).elapsed()
    }

    /// Ends the session, and every use of its token.
    pub(crate) fn end(&self) {
        if !self.has_ended.swap(true, Ordering::AcqRel) {
            self.account.end();
        }
    }
}

/// All sessions, and the sign-in.
#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) offer: Offer,
    /// Sessions by the hash of their secret, so that a lookup does not depend on its characters.
    by_hash: Mutex<HashMap<String, Arc<Session>>>,
    checks: Semaphore,
    /// Random key of the form tokens of users whom a proxy signs in.
    form_key: OnceLock<String>,
}

impl Sessions {
    pub(crate) fn new(offer: Offer) -> Self {
        Self {
            offer,
            by_hash: Mutex::default(),
            checks: Semaphore::new(CHECKS_MAX),
            form_key: OnceLock::new(),
        }
    }

    /// Returns the session of a secret, and counts this as a use.
    pub(crate) fn find(&self, secret: &str) -> Option<Arc<Session>> {
        let hash = sha256_hex(secret.as_bytes());
        let session = lock(&self.by_hash).get(&hash).cloned()?;
        if session.is_over() || session.idle() >= self.idle_max() {
            self.end(secret);
            return None;
        }
        *lock(&session.used) = Instant::now();
        Some(session)
    }

    /// Checks a token, and starts a session with a new secret, which it returns.
    pub(crate) async fn start(&self, token: Token) -> Result<String, Refusal> {
        let secret = random_secret().map_err(unavailable)?;
        self.start_as(token, &secret).await?;
        Ok(secret)
    }

    /// Checks a token, and starts the session of a secret.
    pub(crate) async fn start_as(
        &self,
        token: Token,
        secret: &str,
    ) -> Result<Arc<Session>, Refusal> {
        let account = {
            let permit = timeout(CHECK_WAIT_MAX, self.checks.acquire()).await;
            // The semaphore is never closed.
            let _permit = permit.map_err(|_| busy())?.ok();
            // Another request may have started the session meanwhile.
            if let Some(session) = self.find(secret) {
                return Ok(session);
            }
            self.offer.directory.sign_in(token).await?
        };
        let form_token = self.form_token(account.name()).map_err(unavailable)?;
        let session = Arc::new(Session::new(account, self.offer.allows_actions, form_token));
        self.sweep();
        let hash = sha256_hex(secret.as_bytes());
        let mut sessions = lock(&self.by_hash);
        // A page sends requests side by side. With a new token of a proxy, the first of them starts
        // the session of all.
        if let Some(first) = sessions.get(&hash).filter(|first| !first.is_over()) {
            session.end();
            return Ok(first.clone());
        }
        if sessions.len() >= SESSIONS_MAX {
            session.end();
            return Err(Refusal::Unavailable(format!(
                "this server has {SESSIONS_MAX} sessions, its maximum; try again later"
            )));
        }
        let of_user =
            sessions.iter().filter(|(_, one)| one.account.name() == session.account.name());
        let mut of_user: Vec<(Duration, String)> =
            of_user.map(|(hash, one)| (one.idle(), hash.clone())).collect();
        if of_user.len() >= SESSIONS_OF_USER_MAX {
            of_user.sort();
            let oldest = of_user.pop().and_then(|(_, hash)| sessions.remove(&hash));
            oldest.inspect(|oldest| oldest.end());
        }
        let before = sessions.insert(hash, session.clone());
        before.inspect(|before| before.end());
        Ok(session)
    }

    /// Ends the session of a secret.
    pub(crate) fn end(&self, secret: &str) {
        let ended = lock(&self.by_hash).remove(&sha256_hex(secret.as_bytes()));
        ended.inspect(|session| session.end());
    }

    /// Ends sessions whose token has expired, or that are idle.
    pub(crate) fn sweep(&self) {
        let idle_max = self.idle_max();
        lock(&self.by_hash).retain(|_, session| {
            let is_over = session.is_over() || session.idle() >= idle_max;
            if is_over {
                session.end();
            }
            !is_over
        });
    }

    fn idle_max(&self) -> Duration {
        match self.offer.sign_in {
            SignIn::Form => IDLE_MAX,
            SignIn::Header => IDLE_MAX_OF_PROXY,
        }
    }

    /// Returns the token for the forms of a new session. A proxy replaces its token at any time,
    /// which starts another session; forms that the user has open must stay valid.
    fn form_token(&self, user: &str) -> std::io::Result<String> {
        if self.offer.sign_in == SignIn::Form {
            return random_secret();
        }
        let key = match self.form_key.get() {
            Some(key) => key,
            None => {
                let key = random_secret()?;
                self.form_key.get_or_init(|| key)
            }
        };
        // The hash of the name has a fixed length: the token of one user cannot be extended to a
        // token of another.
        Ok(sha256_hex(format!("{key}{}", sha256_hex(user.as_bytes())).as_bytes()))
    }

    /// Checks the token of a form.
    pub(crate) fn is_form_of(session: &Session, given: &str) -> bool {
        is_equal(given, session.actions.token())
    }
}

fn busy() -> Refusal {
    Refusal::Unavailable("the server checks too many sign-ins; try again later".to_owned())
}

fn unavailable(error: std::io::Error) -> Refusal {
    Refusal::Unavailable(format!("cannot read random numbers: {error}"))
}

/// Returns random bytes in hex, from the system's secure random source.
fn random_secret() -> std::io::Result<String> {
    let mut bytes = [0; SECRET_BYTES];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(hex(&bytes))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::FakeDirectory;

    fn sessions(sign_in: SignIn) -> (Sessions, Arc<FakeDirectory>) {
        let directory = Arc::new(FakeDirectory::default());
        (sessions_of(sign_in, directory.clone()), directory)
    }

    fn sessions_of(sign_in: SignIn, directory: Arc<FakeDirectory>) -> Sessions {
        Sessions::new(Offer { directory, sign_in, hosts: vec![], allows_actions: true })
    }

    fn token(text: &str) -> Token {
        Token::new(text).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_end_when_idle_expired_or_signed_out() {
        let (sessions, directory) = sessions(SignIn::Form);
        let secret = sessions.start(token("ada")).await.unwrap();
        assert_eq!(secret.len(), 64);
        assert_ne!(secret, sessions.start(token("ada")).await.unwrap());
        assert_eq!(sessions.find(&secret).unwrap().account.name(), "ada");
        assert!(sessions.find("other").is_none());
        // Each use extends a session.
        for _ in 0..3 {
            tokio::time::advance(IDLE_MAX - Duration::from_secs(1)).await;
            assert!(sessions.find(&secret).is_some());
        }
        tokio::time::advance(IDLE_MAX).await;
        assert!(sessions.find(&secret).is_none());
        let secret = sessions.start(token("ada")).await.unwrap();
        let session = sessions.find(&secret).unwrap();
        sessions.end(&secret);
        assert!(sessions.find(&secret).is_none() && session.is_over());
        // The token expired in 1970.
        let secret = sessions.start(token("expired")).await.unwrap();
        assert!(sessions.find(&secret).is_none());
        assert_eq!(*directory.ended.lock().unwrap(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_sign_ins_delay_others_only() {
        let delay = Duration::from_secs(1);
        let directory = Arc::new(FakeDirectory { delay, ..FakeDirectory::default() });
        let sessions = sessions_of(SignIn::Form, directory);
        let begin = Instant::now();
        let tokens = std::iter::repeat_n("wrong", 9 * CHECKS_MAX).chain(["ada"]);
        let all = tokens.map(|text| sessions.start(token(text)));
        let mut answers = futures::future::join_all(all).await;
        assert_eq!(begin.elapsed().as_secs(), 10, "{CHECKS_MAX} at a time");
        assert!(answers.pop().unwrap().is_ok());
        assert!(answers.iter().all(|answer| matches!(answer, Err(Refusal::Token(_)))));
    }

    #[tokio::test(start_paused = true)]
    async fn sign_ins_wait_for_a_limited_time() {
        let delay = 2 * CHECK_WAIT_MAX;
        let directory = Arc::new(FakeDirectory { delay, ..FakeDirectory::default() });
        let sessions = sessions_of(SignIn::Form, directory);
        let tokens = std::iter::repeat_n("ada", CHECKS_MAX + 1);
        let all = tokens.map(|text| sessions.start(token(text)));
        let mut answers = futures::future::join_all(all).await;
        assert!(matches!(answers.pop(), Some(Err(Refusal::Unavailable(_)))));
        assert!(answers.iter().all(Result::is_ok));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_requests_join_a_session() {
        let delay = Duration::from_secs(1);
        let directory = Arc::new(FakeDirectory { delay, ..FakeDirectory::default() });
        let sessions = sessions_of(SignIn::Header, directory.clone());
        let all = (0..2 * CHECKS_MAX).map(|_| sessions.start_as(token("ada"), "ada"));
        let answers = futures::future::join_all(all).await;
        assert!(answers.iter().all(Result::is_ok));
        assert_eq!(*directory.asked.lock().unwrap(), CHECKS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn one_user_cannot_end_sessions_of_others() {
        let (sessions, _) = sessions(SignIn::Form);
        let other = sessions.start(token("grace")).await.unwrap();
        let first = sessions.start(token("ada")).await.unwrap();
        let mut latest = String::new();
        for _ in 0..SESSIONS_OF_USER_MAX {
            tokio::time::advance(Duration::from_secs(1)).await;
            latest = sessions.start(token("ada")).await.unwrap();
        }
        assert!(sessions.find(&first).is_none());
        assert!(sessions.find(&latest).is_some() && sessions.find(&other).is_some());
    }

    #[tokio::test]
    async fn requests_side_by_side_start_one_session() {
        let (sessions, _) = sessions(SignIn::Header);
        let start = || sessions.start_as(token("ada"), "ada");
        let (one, other) = futures::future::join(start(), start()).await;
        let (one, other) = (one.unwrap(), other.unwrap());
        assert!(Arc::ptr_eq(&one, &other) && !one.is_over());
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_of_a_proxy_end_sooner() {
        let (sessions, _) = sessions(SignIn::Header);
        sessions.start_as(token("ada"), "ada").await.unwrap();
        assert!(sessions.find("ada").is_some());
        tokio::time::advance(IDLE_MAX_OF_PROXY).await;
        sessions.sweep();
        assert!(lock(&sessions.by_hash).is_empty());
    }
}
