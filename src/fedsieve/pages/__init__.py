"""Pages for people: one to check suspicious labels on, one to read what runs did."""

from fedsieve.pages.report import ReportExtras, report_page
from fedsieve.pages.review import ReviewItem, review_page

__all__ = ["ReportExtras", "ReviewItem", "report_page", "review_page"]
