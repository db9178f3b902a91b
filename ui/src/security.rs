//! Access to the page: tokens, sessions, host names and headers.
//!
//! A private page listens on the loopback interface only. Other users of the machine, and pages of
//! other sites in the same browser, can reach it there: so each request needs a token, and must
//! name a loopback host. On a shared page, each request needs a session.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Redirect, Response};
use http_body_util::LengthLimitError;

use crate::rows::MetricsCache;
use crate::sessions::{Session, Sessions, SignIn};
use crate::site::{Site, SiteViewer};
use crate::viewer::{Refusal, Token, Viewer};

/// Credentials and host names of a private page.
#[derive(Clone, Debug)]
pub struct Access {
    /// Token that the first request contains as `?token=`, and later ones as a cookie.
    pub token: String,
    /// Host names with port that requests may name, such as `127.0.0.1:8265`.
    pub hosts: Vec<String>,
    /// Name of the cookie. Browsers share cookies among the ports of a host.
    pub cookie: String,
}

/// Rule for the viewers of a page.
#[derive(Debug)]
pub(crate) enum Gate {
    /// The user who started the page.
    Private(Access, Arc<Viewer>),
    /// All viewers who sign in.
    Shared(Arc<Sessions>, Arc<MetricsCache>),
}

/// Content policy of all pages: scripts, styles and data come from this server only.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
     img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; \
     frame-ancestors 'none'";
/// Names of the loopback interface.
const LOOPBACK: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// Maximum size of a form of a viewer, such as an action on 100 experiments.
const FORM_BYTES_MAX: usize = 2 << 20;
/// Maximum size of a form without a viewer: a token.
const SIGN_IN_BYTES_MAX: usize = 64 << 10;
/// Maximum time in which a form must arrive.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);

/// Checks host name and origin of any request, and adds headers to its response.
pub(crate) async fn guard(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let checked = check_origin(&gate, request.method(), request.uri(), request.headers());
    let mut response = match checked {
        Ok(()) => next.run(request).await,
        Err(text) => (StatusCode::FORBIDDEN, text).into_response(),
    };
    let headers = response.headers_mut();
    let fixed = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_FRAME_OPTIONS, "DENY"),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Finds the viewer of a request. Without one, no route with records is reached.
pub(crate) async fn admit(
    State(gate): State<Arc<Gate>>,
    mut request: Request,
    next: Next,
) -> Response {
    let viewer = match &*gate {
        Gate::Private(access, viewer) => {
            check(access, request.uri(), request.headers()).map(|()| viewer.clone())
        }
        Gate::Shared(sessions, metrics) => {
            let refused = refusal(sessions, &request);
            viewer(sessions, metrics, request.headers()).await.map(Arc::new).map_err(refused)
        }
    };
    match viewer {
        Ok(viewer) => {
            request.extensions_mut().insert(viewer);
            without_cache(with_body(request, next, FORM_BYTES_MAX).await).await
        }
        Err(response) => without_cache(*response).await,
    }
}

/// Reads the form of a request without a viewer.
pub(crate) async fn read_sign_in(request: Request, next: Next) -> Response {
    with_body(request, next, SIGN_IN_BYTES_MAX).await
}

/// Answers a request once its body has arrived. A body that never ends must not hold a connection.
async fn with_body(request: Request, next: Next, bytes_max: usize) -> Response {
    let (head, body) = request.into_parts();
    match tokio::time::timeout(FORM_TIMEOUT, to_bytes(body, bytes_max)).await {
        Ok(Ok(bytes)) => next.run(Request::from_parts(head, Body::from(bytes))).await,
        Ok(Err(error)) if is_too_large(&error) => {
            let text = format!("the form has more than {bytes_max} bytes\n");
            (StatusCode::PAYLOAD_TOO_LARGE, text).into_response()
        }
        Ok(Err(_)) => (StatusCode::BAD_REQUEST, "the form is incomplete\n").into_response(),
        Err(_) => {
            let text = format!("the form did not arrive within {} s\n", FORM_TIMEOUT.as_secs());
            (StatusCode::REQUEST_TIMEOUT, text).into_response()
        }
    }
}

fn is_too_large(error: &axum::Error) -> bool {
    error.source().is_some_and(|source| source.is::<LengthLimitError>())
}

/// Keeps browsers and proxies from storing a response, unless it contains its own rule.
pub(crate) async fn without_cache(mut response: Response) -> Response {
    let no_store = HeaderValue::from_static("no-store");
    response.headers_mut().entry(header::CACHE_CONTROL).or_insert(no_store);
    response
}

/// Refuses requests to other host names, and forms of other sites.
fn check_origin(
    gate: &Gate,
    method: &Method,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<(), &'static str> {
    let host = host(headers);
    // A page of another site may resolve its own name to this machine.
    let is_known = match gate {
        Gate::Private(access, _) => access.hosts.iter().any(|of| of == host),
        // The node sends probes to the address of the pod.
        Gate::Shared(..) if uri.path() == "/healthz" => true,
        Gate::Shared(sessions, _) => {
            let name = name_of(host);
            let known = sessions.offer.hosts.iter().map(String::as_str).chain(LOOPBACK);
            known.into_iter().any(|known| known.eq_ignore_ascii_case(name))
        }
    };
    if !is_known {
        return Err("the host name in the URL is not one of this page\n");
    }
    let site = fetch_site(headers);
    if method != Method::GET && !matches!(site, None | Some("same-origin" | "none")) {
        return Err("the form is one of another site\n");
    }
    Ok(())
}

/// Returns the relation of the site that started a request to this one, as the browser reports it.
fn fetch_site(headers: &HeaderMap) -> Option<&str> {
    headers.get("sec-fetch-site").and_then(|site| site.to_str().ok())
}

/// Returns whether a page of another site started a request, for example by a link.
pub(crate) fn is_cross_site(headers: &HeaderMap) -> bool {
    fetch_site(headers) == Some("cross-site")
}

fn host(headers: &HeaderMap) -> &str {
    headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default()
}

/// Returns a host name without its port.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Returns the name of the session's cookie. With `__Host-`, a browser accepts it over TLS only,
/// and from no other host of the domain. On the loopback interface, ports share cookies.
fn cookie_name(headers: &HeaderMap) -> (String, bool) {
    let host = host(headers);
    match LOOPBACK.contains(&name_of(host)) {
        true => (format!("stoker-session-{}", host.rsplit(':').next().unwrap_or_default()), false),
        false => ("__Host-stoker-session".to_owned(), true),
    }
}

/// Returns the cookie of a session. Over the network, browsers keep it with TLS only.
pub(crate) fn session_cookie(headers: &HeaderMap, secret: &str) -> String {
    let (name, is_secure) = cookie_name(headers);
    let secure = if is_secure { "; Secure" } else { "" };
    format!("{name}={secret}; Path=/; HttpOnly; SameSite=Strict{secure}")
}

/// Returns the secret of the session's cookie.
pub(crate) fn session(headers: &HeaderMap) -> Option<String> {
    cookie(headers, &cookie_name(headers).0).map(str::to_owned)
}

/// Finds the session of a request, and what its viewer may see now.
async fn viewer(
    sessions: &Arc<Sessions>,
    metrics: &Arc<MetricsCache>,
    headers: &HeaderMap,
) -> Result<Viewer, Refusal> {
    let signed_out = || Refusal::Token("sign in to see this page".to_owned());
    let session: Arc<Session> = match sessions.offer.sign_in {
        SignIn::Form => {
            let secret = session(headers).ok_or_else(signed_out)?;
            sessions.find(&secret).ok_or_else(signed_out)?
        }
        SignIn::Header => {
            let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
            let bearer = given.filter(|given| given.get(..7).is_some_and(is_bearer));
            let token = bearer.and_then(Token::new).ok_or_else(|| {
                Refusal::Token(
                    "the request has no header `Authorization: Bearer TOKEN`; open the page \
                     through the authenticating proxy"
                        .to_owned(),
                )
            })?;
            match sessions.find(token.expose()) {
                Some(session) => session,
                None => sessions.start_as(token.clone(), token.expose()).await?,
            }
        }
    };
    let sight = match session.account.sight().await {
        Ok(sight) => sight,
        Err(refusal) => {
            if matches!(refusal, Refusal::Token(_)) {
                session.end();
            }
            return Err(refusal);
        }
    };
    let site = Site {
        place: sight.place.clone(),
        is_cluster: true,
        arguments: String::new(),
        namespace: None,
        actions: Some(session.actions.clone()),
        viewer: Some(SiteViewer {
            name: crate::text::name(session.account.name()),
            csrf: session.actions.token().to_owned(),
            can_sign_out: sessions.offer.sign_in == SignIn::Form,
        }),
    };
    let (visible, metrics) = (sight.visible.clone(), metrics.clone());
    Ok(Viewer { visible, site, metrics, session: Some((session, sight)) })
}

fn is_bearer(word: &str) -> bool {
    word.eq_ignore_ascii_case("bearer ")
}

/// Returns how a request without a viewer is answered: pages lead to the sign-in.
fn refusal(
    sessions: &Sessions,
    request: &Request,
) -> impl FnOnce(Refusal) -> Box<Response> + use<> {
    let has = |name: &str, part: &str| {
        let value = request.headers().get(name).and_then(|value| value.to_str().ok());
        value.is_some_and(|value| value.contains(part))
    };
    let is_form = sessions.offer.sign_in == SignIn::Form;
    let is_page = is_form && request.method() == Method::GET && has("accept", "text/html");
    let is_part = has("hx-request", "true");
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
    move |refusal| {
        let response = match refusal {
            Refusal::Unavailable(why) => {
                (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response()
            }
            Refusal::Token(_) if is_page && !is_part => {
                Redirect::to(&format!("/sign-in?next={}", crate::text::query(&path)))
                    .into_response()
            }
            // A part of a page: the browser loads the whole page again.
            Refusal::Token(why) if is_part => {
                (StatusCode::UNAUTHORIZED, [("hx-refresh", "true")], format!("{why}\n"))
                    .into_response()
            }
            Refusal::Token(why) => (StatusCode::UNAUTHORIZED, format!("{why}\n")).into_response(),
        };
        Box::new(response)
    }
}

fn check(access: &Access, uri: &Uri, headers: &HeaderMap) -> Result<(), Box<Response>> {
    let refuse = |text: &'static str| Box::new((StatusCode::FORBIDDEN, text).into_response());
    if let Some(given) = query_token(uri) {
        if !is_equal(given, &access.token) {
            return Err(refuse("the token in the URL is not valid; use the URL of `stoker ui`\n"));
        }
        return Err(Box::new(with_cookie(access, uri)));
    }
    if cookie(headers, &access.cookie).is_some_and(|given| is_equal(given, &access.token)) {
        return Ok(());
    }
    Err(refuse("open the URL that `stoker ui` printed: it contains a token\n"))
}

/// Returns a redirect to the URL without its token, with the cookie.
fn with_cookie(access: &Access, uri: &Uri) -> Response {
    let rest = uri.query().unwrap_or_default().split('&');
    let rest: Vec<&str> = rest.filter(|part| !part.starts_with("token=")).collect();
    let target = match rest.as_slice() {
        [] | [""] => uri.path().to_owned(),
        rest => format!("{}?{}", uri.path(), rest.join("&")),
    };
    // A path such as `//host` would lead to another site.
    let target = format!("/{}", target.trim_start_matches('/'));
    let cookie = format!("{}={}; Path=/; HttpOnly; SameSite=Strict", access.cookie, access.token);
    let headers = [(header::LOCATION, target), (header::SET_COOKIE, cookie)];
    (StatusCode::SEE_OTHER, headers).into_response()
}

fn query_token(uri: &Uri) -> Option<&str> {
    uri.query()?.split('&').find_map(|part| part.strip_prefix("token="))
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    cookies
        .flat_map(|value| value.split(';'))
        .find_map(|cookie| cookie.trim().strip_prefix(name)?.strip_prefix('='))
}

/// Compares two secrets in a time that does not depend on where they differ.
pub(crate) fn is_equal(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    one.len() == other.len()
        && one.iter().zip(other).fold(0, |differ, (one, other)| differ | (one ^ other)) == 0
}

#[cfg(test)]
mod tests;
