//! Pages of a shared page: sign-in, sign-out and namespaces.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Extension, RawQuery, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use axum::routing::get;
use axum::{Router, middleware};

use crate::build::plain_frame;
use crate::respond::{html, message};
use crate::security;
use crate::server::{App, values};
use crate::sessions::{Session, Sessions, SignIn};
use crate::site::Site;
use crate::text;
use crate::viewer::{Refusal, Sight, Token, Viewer};
use crate::views::{NamespaceRow, NamespacesPage, SignInPage};

type Sign = State<Arc<Sessions>>;

/// Routes that need no session. They have no access to records.
pub(crate) fn routes(sessions: Arc<Sessions>) -> Router {
    let router = match sessions.offer.sign_in {
        SignIn::Form => Router::new()
            .route("/sign-in", get(form).post(sign_in))
            .route("/signed-in", get(signed_in))
            .layer(middleware::from_fn(security::read_sign_in)),
        SignIn::Header => Router::new(),
    };
    let no_store = middleware::map_response(security::without_cache);
    router.layer(no_store).route("/healthz", get(|| async { "ok\n" })).with_state(sessions)
}

/// Returns the path to go to after the sign-in. A path such as `//host` would lead elsewhere.
pub(crate) fn next(wanted: &str) -> String {
    let is_path = wanted.starts_with('/')
        && !wanted.starts_with("//")
        && wanted.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if is_path { wanted.to_owned() } else { "/experiments".to_owned() }
}

fn first(query: Option<&str>, name: &str) -> String {
    values(query, name).into_iter().next().unwrap_or_default()
}

fn page(status: StatusCode, next: String, error: Option<String>) -> Response {
    let mut frame = plain_frame(&Site::default(), "sign-in", "Sign in · Stoker");
    frame.is_signed_out = true;
    (status, html(&SignInPage { frame, next, error })).into_response()
}

async fn form(State(sessions): Sign, headers: HeaderMap, RawQuery(query): RawQuery) -> Response {
    let next = next(&first(query.as_deref(), "next"));
    if security::session(&headers).and_then(|secret| sessions.find(&secret)).is_some() {
        return Redirect::to(&next).into_response();
    }
    let is_first = first(query.as_deref(), "again").is_empty();
    let again = format!("0; url=/sign-in?next={}&again=1", text::query(&next));
    let mut response = page(StatusCode::OK, next, None);
    // For a link on another site, browsers send no cookie with `SameSite=Strict`, although there
    // may be a session. A request that this page itself starts has the cookie.
    if is_first
        && security::is_cross_site(&headers)
        && let Ok(again) = HeaderValue::try_from(again)
    {
        response.headers_mut().insert(header::REFRESH, again);
    }
    response
}

async fn sign_in(State(sessions): Sign, headers: HeaderMap, body: Bytes) -> Response {
    let form = String::from_utf8_lossy(&body).into_owned();
    let next = next(&first(Some(&form), "next"));
    let Some(token) = Token::new(&first(Some(&form), "token")) else {
        let error = "This is not a token: a token has no spaces.".to_owned();
        return page(StatusCode::UNAUTHORIZED, next, Some(error));
    };
    match sessions.start(token).await {
        Ok(secret) => {
            let target = format!("/signed-in?next={}", text::query(&next));
            let cookie = security::session_cookie(&headers, &secret);
            (StatusCode::SEE_OTHER, [(header::LOCATION, target), (header::SET_COOKIE, cookie)])
                .into_response()
        }
        Err(Refusal::Token(why)) => page(StatusCode::UNAUTHORIZED, next, Some(why)),
        Err(Refusal::Unavailable(why)) => page(StatusCode::SERVICE_UNAVAILABLE, next, Some(why)),
    }
}

/// Checks that the browser has kept the cookie.
async fn signed_in(
    State(sessions): Sign,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Response {
    let next = next(&first(query.as_deref(), "next"));
    if security::session(&headers).and_then(|secret| sessions.find(&secret)).is_some() {
        return Redirect::to(&next).into_response();
    }
    let error = "The browser did not keep the cookie of the session. Open the page with https://, \
                 or through `kubectl port-forward` at http://localhost, and allow cookies.";
    page(StatusCode::UNAUTHORIZED, next, Some(error.to_owned()))
}

/// Returns the session of a form with a valid token.
fn session_of_form<'a>(
    viewer: &'a Viewer,
    form: &str,
) -> Result<&'a (Arc<Session>, Sight), Box<Response>> {
    let refuse =
        |status, title: &str, text: &str| Err(Box::new(message(&viewer.site, status, title, text)));
    let Some(session) = &viewer.session else {
        let text = "This page has one viewer: the user who started it.";
        return refuse(StatusCode::NOT_FOUND, "Page not found", text);
    };
    if !Sessions::is_form_of(&session.0, &first(Some(form), "csrf")) {
        let text = "The form is not one of this session. Go back, load the page again, and repeat.";
        return refuse(StatusCode::FORBIDDEN, "Form not accepted", text);
    }
    Ok(session)
}

/// Ends the session.
pub(crate) async fn sign_out(Extension(viewer): App, headers: HeaderMap, body: Bytes) -> Response {
    let form = String::from_utf8_lossy(&body).into_owned();
    match session_of_form(&viewer, &form) {
        Ok((session, _)) => session.end(),
        Err(response) => return *response,
    }
    let cookie = format!("{}; Max-Age=0", security::session_cookie(&headers, ""));
    let headers = [(header::LOCATION, "/sign-in".to_owned()), (header::SET_COOKIE, cookie)];
    (StatusCode::SEE_OTHER, headers).into_response()
}

fn namespaces_page(viewer: &Viewer, sight: &Sight, error: Option<String>) -> NamespacesPage {
    let row = |(name, missing): &(String, Option<String>)| NamespaceRow {
        name: text::name(name),
        href: format!("/experiments?namespace={}", text::query(name)),
        missing: missing.as_deref().map(text::escape),
    };
    NamespacesPage {
        frame: plain_frame(&viewer.site, "namespaces", "Namespaces · Stoker"),
        is_everywhere: sight.is_everywhere,
        namespaces: sight.namespaces.iter().map(row).collect(),
        error,
    }
}

/// Namespaces that the viewer sees, and those without permission.
pub(crate) async fn namespaces(Extension(viewer): App) -> Response {
    match &viewer.session {
        Some((_, sight)) => html(&namespaces_page(&viewer, sight, None)),
        None => Redirect::to("/experiments").into_response(),
    }
}

/// Adds a namespace that the viewer names.
pub(crate) async fn add_namespace(Extension(viewer): App, body: Bytes) -> Response {
    let form = String::from_utf8_lossy(&body).into_owned();
    let (session, sight) = match session_of_form(&viewer, &form) {
        Ok(session) => session,
        Err(response) => return *response,
    };
    match session.account.add_namespace(first(Some(&form), "name").trim()) {
        Ok(()) => Redirect::to("/namespaces").into_response(),
        Err(error) => {
            let page = namespaces_page(&viewer, sight, Some(error));
            (StatusCode::UNPROCESSABLE_ENTITY, html(&page)).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use futures::{StreamExt as _, stream};
    use tower_service::Service as _;

    use super::*;
    use crate::fixture::FakeDirectory;
    use crate::sessions::Offer;

    #[tokio::test(start_paused = true)]
    async fn forms_must_arrive_in_time() {
        let directory = Arc::new(FakeDirectory::default());
        let hosts = Vec::new();
        let offer = Offer { directory, sign_in: SignIn::Form, hosts, allows_actions: false };
        let sessions = Arc::new(Sessions::new(offer));
        let status = async |body: Body| {
            let request = Request::post("/sign-in").body(body).unwrap();
            routes(sessions.clone()).call(request).await.unwrap().status().as_u16()
        };
        let begin = || stream::iter([Ok::<_, std::io::Error>("token=")]);
        assert_eq!(status(Body::from_stream(begin().chain(stream::iter([Ok("ada")])))).await, 303);
        assert_eq!(status(Body::from_stream(begin().chain(stream::pending()))).await, 408);
        assert_eq!(status(Body::from("token=".to_owned() + &"a".repeat(1 << 16))).await, 413);
        let reset = stream::iter([Err(std::io::ErrorKind::ConnectionReset.into())]);
        assert_eq!(status(Body::from_stream(begin().chain(reset))).await, 400);
    }

    #[test]
    fn sign_in_leads_to_this_server_only() {
        let check = |wanted: &str, expected: &str| assert_eq!(next(wanted), expected);
        check("/experiments/ml/iris?x=time", "/experiments/ml/iris?x=time");
        for elsewhere in ["", "//evil.example", "https://evil.example", "/\\evil.example", "/a b"] {
            check(elsewhere, "/experiments");
        }
    }
}
